"""`names:flowers`: a model that is learned in a moment from a list of names, and kept as safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from polymux.core.errors import ModelError
from polymux.core.models import Located, ModelSource
from polymux.core.models.cache import build_once, find_entry
from polymux.core.models.source import Report
from polymux_example.work import ALPHABET

LISTS = {
    "flowers": "acacia amaryllis anemone aster azalea begonia bluebell camellia carnation clematis crocus daffodil "
    "dahlia daisy freesia gardenia geranium gladiolus hibiscus hyacinth iris jasmine lavender lilac lily lotus "
    "magnolia marigold narcissus orchid pansy peony petunia poppy primrose rose snowdrop sunflower tulip verbena "
    "violet wisteria zinnia",
    "stars": "achernar acrux aldebaran algol alnilam alnitak altair antares arcturus bellatrix betelgeuse canopus "
    "capella castor deneb fomalhaut hadar mimosa mira mizar polaris pollux procyon regulus rigel sirius spica vega",
}


class NamesSource(ModelSource):
    scheme = "names"

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        if name not in LISTS:
            raise ModelError(f"names:{name}: there is no such list; there are: {', '.join(LISTS)}")
        identity = f"names-{name}-1"
        return Located(build_once(find_entry("models", identity), lambda folder: learn(name, folder)), identity)

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        return name in LISTS and find_entry("models", f"names-{name}-1").exists()


def learn(name: str, folder: Path) -> None:
    """Counts which letter follows which two, with a little of everything else, and writes the model."""
    counts = np.full((len(ALPHABET),) * 3, 0.01, np.float32)
    for word in LISTS[name].split():
        places = [0, 0, *(ALPHABET.index(letter) for letter in word), 0]
        for before, last, following in zip(places, places[1:], places[2:]):
            counts[before, last, following] += 1
    save_file({"counts": counts}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "letter-table", "theme": name}))
