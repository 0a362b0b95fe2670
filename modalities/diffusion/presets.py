"""Quality presets: `exact` computes every step, `balanced` and `fast` reuse what earlier steps left.

What a preset means depends on the model. Calibrated ones (`polymux calibrate`) follow a schedule that is known
beforehand; others measure as they go; UNets keep their depths for some steps. Where too few steps are left to skip
any of them safely, a preset changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from polymux.core.batch.denoiser import DenoiseModel
from polymux.core.cache.stepcache import DeepCache, FirstBlock, MagCache, StepRule
from polymux.core.errors import ConfigError, InvalidRequest
from polymux.core.models.files import read_json
from polymux.modalities.diffusion.unet import UNetDenoiser

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

Quality = Literal["exact", "balanced", "fast"]
QUALITIES: tuple[str, ...] = get_args(Quality)

CALIBRATION = "step_cache.json"
"""In a model's folder, or named by the option `calibration`: {"ratios": [...], "steps": n}."""

FEWEST = 10
"""Steps below which every one of them changes too much to be left out (distilled models)."""


@dataclass(frozen=True)
class Presets:
    """Rules by name, and the one that the operator set (`step_cache`) for requests that name none."""

    rules: Mapping[str, StepRule | None]
    own: StepRule | None = None

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any], model: DenoiseModel, own: StepRule | None) -> Presets:
        """Raises `ConfigError` for a calibration that cannot be read."""
        if isinstance(model, UNetDenoiser):
            return cls({"exact": None, "balanced": DeepCache(interval=2), "fast": DeepCache(interval=3)}, own)
        given = options.get("calibration")
        path = files.folder / CALIBRATION if given is None else files.folder / str(given)
        if given is None and not path.exists():
            return cls(
                {
                    "exact": None,
                    "balanced": FirstBlock(threshold=0.08, warmup=4, max_skips=2),
                    "fast": FirstBlock(threshold=0.15, warmup=3, max_skips=4),
                },
                own,
            )
        ratios = read_json(path).get("ratios")
        if not isinstance(ratios, list) or not ratios or not all(isinstance(ratio, int | float) for ratio in ratios):
            raise ConfigError(f"{path} holds no list of ratios: make it with `polymux calibrate`", param="calibration")
        kept = tuple(float(ratio) for ratio in ratios)
        return cls(
            {
                "exact": None,
                "balanced": MagCache(ratios=kept, threshold=0.06, max_skips=2),
                "fast": MagCache(ratios=kept, threshold=0.12, max_skips=4),
            },
            own,
        )

    def find(self, name: str, steps: int) -> StepRule | None:
        """The rule for a picture of so many steps; without a name the operator's.

        Raises `InvalidRequest` for an unknown name.
        """
        if not name:
            return self.own
        if name not in self.rules:
            raise InvalidRequest(f"quality is one of {', '.join(QUALITIES)}", param="quality")
        return self.rules[name] if steps >= FEWEST else None
