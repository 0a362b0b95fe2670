"""Packages are computed: a hand-written list silently ships a wheel without what it forgets.

The import path says the folder: `polymux.core` is `core/`, `polymux.gateway` is `gateway/`,
`polymux.modalities` is `modalities/`.
"""

from setuptools import find_packages, setup

FOLDERS = ("core", "gateway", "modalities")

packages = ["polymux"]
for folder in FOLDERS:
    packages.append(f"polymux.{folder}")
    packages += [f"polymux.{folder}.{name}" for name in find_packages(folder)]

setup(
    packages=packages,
    package_dir={"polymux": "polymux", **{f"polymux.{folder}": folder for folder in FOLDERS}},
    package_data={
        "": ["py.typed", "*.cpp", "*.html", "*.css", "*.js", "*.svg", "templates/*/*.txt", "templates/*/*/*.txt"]
    },
)
