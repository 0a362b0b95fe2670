"""Quality presets: `exact` computes every step, `balanced` and `fast` reuse what earlier steps left.

What a preset means depends on the model. `polymux calibrate` chooses the rules by trying them; without that,
transformers measure as they go, and UNets keep their depths for some steps. Where too few steps are left to skip any of
them safely, a preset changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from polymux.core.batch.denoiser import DenoiseModel
from polymux.core.cache.stepcache import DeepCache, FirstBlock, MagCache, StepRule, TeaCache
from polymux.core.errors import ConfigError, InvalidRequest
from polymux.core.models.files import read_json
from polymux.modalities.diffusion.unet import UNetDenoiser

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

Quality = Literal["exact", "balanced", "fast"]
QUALITIES: tuple[str, ...] = get_args(Quality)

CALIBRATION = "step_cache.json"
"""In a model's folder, or named by the option `calibration`: what `polymux calibrate` wrote."""

RULES: dict[str, type[StepRule]] = {rule.__name__: rule for rule in (DeepCache, FirstBlock, MagCache, TeaCache)}
"""What a calibrated preset may be."""

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
        given = options.get("calibration")
        path = files.folder / CALIBRATION if given is None else files.folder / str(given)
        if given is not None or path.exists():
            return cls({"exact": None, **read_calibration(path)}, own)
        rules: dict[str, StepRule]
        if isinstance(model, UNetDenoiser):
            rules = {"balanced": DeepCache(interval=2), "fast": DeepCache(interval=3)}
        else:
            rules = {
                "balanced": FirstBlock(threshold=0.08, warmup=4, max_skips=2),
                "fast": FirstBlock(threshold=0.15, warmup=3, max_skips=4),
            }
        return cls({"exact": None, **rules}, own)

    def find(self, name: str, steps: int) -> StepRule | None:
        """The rule for a picture of so many steps; without a name the operator's.

        Raises `InvalidRequest` for an unknown name.
        """
        if not name:
            return self.own
        if name not in self.rules:
            raise InvalidRequest(f"quality is one of {', '.join(QUALITIES)}", param="quality")
        return self.rules[name] if steps >= FEWEST else None


def read_calibration(path: Path) -> dict[str, StepRule | None]:
    """The presets `balanced` and `fast` of a calibrated checkpoint; None: it computes every step.

    Raises `ConfigError` for a file that is no calibration.
    """
    told = read_json(path)
    try:
        shared = {name: tuple(float(value) for value in told[name]) for name in ("ratios", "polynomial")}
        return {name: _read_rule(told["presets"][name], shared) for name in ("balanced", "fast")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no calibration ({error!r}): make it with `polymux calibrate`", param="calibration"
        ) from None


def _read_rule(told: Mapping[str, Any] | None, shared: Mapping[str, tuple[float, ...]]) -> StepRule | None:
    if told is None:
        return None
    kind = RULES[told["rule"]]
    wanted = {name: value for name, value in shared.items() if name in kind.__dataclass_fields__}
    settings = {name: value for name, value in told.items() if name != "rule"}
    rule = kind(**wanted, **settings)
    rule.plan(FEWEST)  # settings of a wrong kind show now, not at a request
    return rule
