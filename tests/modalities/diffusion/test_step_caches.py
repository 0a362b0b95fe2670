"""Step caches inside mixed batches: every decision and every picture as diffusers' own caches give them alone."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

from polymux.core.batch.denoiser import DenoiseBatch
from polymux.core.cache.stepcache import FirstBlock, MagCache, StepMask, StepProbe, TaylorSeer, TeaCache
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.testing.denoising import DenoiseWork, read_latents, tiny_flux
from polymux.modalities.diffusion import flux

NAMES = ["slow", "a", "cfg", "c", "slow cfg", "wide", "b", "d"]
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}

RATIOS = tuple(FLUX_MAG_RATIOS.tolist())


def first_block(threshold):
    """diffusers' cache has no guards: ours are switched off for the comparison."""
    return FirstBlock(threshold=threshold, tail=0), lambda steps: FirstBlockCacheConfig(threshold=threshold)


def mag_cache(threshold):
    rule = MagCache(ratios=RATIOS, threshold=threshold, tail=0)
    return rule, lambda steps: MagCacheConfig(threshold=threshold, mag_ratios=list(RATIOS), num_inference_steps=steps)


def taylor(interval, order):
    rule = TaylorSeer(interval=interval, order=order, tail=0)
    return rule, lambda steps: TaylorSeerCacheConfig(
        cache_interval=interval, max_order=order, taylor_factors_dtype=torch.float32, use_lite_mode=True
    )


PAIRS = {
    "first block 0.4": first_block(0.4),
    "first block 0.6": first_block(0.6),
    "first block 0.9": first_block(0.9),
    "mag 0.06": mag_cache(0.06),
    "mag 0.3": mag_cache(0.3),
    "taylor": taylor(5, 1),
    "taylor 2": taylor(3, 2),
}


def run_all(driver, names):
    """Submit one job a step, run to idle; every row's decisions by branch, noted as the rows run."""
    noted = {}
    busy, waiting = True, list(names)
    while busy or waiting:
        if waiting:
            driver.submit(waiting[0], "flux", "denoise", DenoiseWork([waiting.pop(0)]))
        busy = driver.step()
        for job in driver.loop.jobs.values():
            for row in job.rows:
                if row.saved:
                    noted[job.id] = [saved.cache.computed for saved in row.saved]
    driver.finish()
    return {name: [[branch[step] for step in sorted(branch)] for branch in rows] for name, rows in noted.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", PAIRS)
def test_decisions_and_pictures_are_those_of_diffusers_alone(pair, device, pictures, drive, paint) -> None:
    rule, config = PAIRS[pair]
    driver = drive(DEVICES[device](), {name: pictures[name].request(rule) for name in NAMES})
    decisions = run_all(driver, NAMES)
    hits = 0
    for name in NAMES:
        alone = paint(name, config(pictures[name].steps))
        if pictures[name].steps > 1:
            assert decisions[name] == alone.computed, name
        torch.testing.assert_close(read_latents(driver, name)[0], alone.latent, atol=2e-5, rtol=2e-5)
        hits += sum(not computed for branch in alone.computed for computed in branch)
        receipt = driver.receipt(name)
        assert receipt.steps_run + receipt.steps_skipped == pictures[name].steps
    assert hits, "the comparison proves nothing without a hit"


def test_the_probe_measures_what_diffusers_calibrates(pictures, drive, paint, capsys) -> None:
    """In a batch with others, the ratios for MagCache are those of diffusers' calibration run."""
    names = ["slow", "a", "cfg"]
    driver = drive(LaggedCpu(), {name: pictures[name].request(StepProbe()) for name in names})
    rows = {}
    for name in names:
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.step()
        rows[name] = next(iter(driver.loop.jobs[name].rows))
    driver.finish()
    for name in names:
        steps = pictures[name].steps
        paint(name, MagCacheConfig(calibrate=True, num_inference_steps=steps))
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
        assert len(printed) == len(rows[name].measured)
        for measured, line in zip(rows[name].measured, printed):
            assert measured[:, 0].tolist() == pytest.approx(json.loads(line), rel=1e-4)
            assert measured[0, 1:].tolist() == [0.0, 0.0]
            assert (measured[1:, 1:] > 0).all()


def paint_with_teacache(picture, rule):
    """TeaCache as its paper's authors run it, for one picture and one branch."""
    model = flux.FluxDenoiser(tiny_flux())
    request = picture.request()
    scheduler, steps = request.scheduler, picture.steps
    latents = torch.randn((1, *picture.shape), generator=torch.Generator().manual_seed(picture.seed))
    accumulated, before, residual, computed = 0.0, None, None, []
    with torch.inference_mode():
        for step, time in enumerate(scheduler.timesteps):
            streams = model.embed(DenoiseBatch(latents, time.expand(1), request.conditions))
            modulated = model.modulate(streams)
            if step in (0, steps - 1):
                full, accumulated = True, 0.0
            else:
                change = ((modulated - before).abs().mean() / before.abs().mean()).item()
                accumulated += sum(c * change**p for p, c in enumerate(reversed(rule.polynomial)))
                full = not accumulated < rule.threshold
                accumulated = 0.0 if full else accumulated
            before = modulated
            if full:
                out = model.body(model.head(streams))
                residual = out.hidden - streams.hidden
            else:
                out = streams.__class__(streams.hidden + residual, streams.beside, streams.shared)
            latents = scheduler.step(model.finish(out), time, latents, return_dict=False)[0]
            computed.append(full)
    return latents[0], computed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threshold", [0.3, 0.7, 1.5])
def test_teacache_in_a_batch_is_teacache_alone(threshold, device, pictures, drive) -> None:
    rule = TeaCache(threshold=threshold, polynomial=(0.5, 1.0, 0.01))
    names = ["slow", "a", "c", "wide", "b"]
    driver = drive(DEVICES[device](), {name: pictures[name].request(rule) for name in names})
    decisions = run_all(driver, names)
    skips = 0
    for name in names:
        latent, computed = paint_with_teacache(pictures[name], rule)
        assert decisions[name] == [computed]
        torch.testing.assert_close(read_latents(driver, name)[0], latent, atol=2e-5, rtol=2e-5)
        skips += computed.count(False)
    assert skips


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_different_rules_share_a_pass_and_equal_themselves_alone(device, pictures, drive, paint) -> None:
    rules = {
        "slow": FirstBlock(threshold=0.6, tail=0),
        "a": None,
        "c": TeaCache(threshold=0.7),
        "slow cfg": MagCache(ratios=RATIOS, threshold=0.3),
        "cfg": TaylorSeer(interval=3),
        "b": StepMask(mask=(True, False)),
    }
    requests = {name: pictures[name].request(rule) for name, rule in rules.items()}
    alone = {}
    for name in rules:
        driver = drive(Device(), requests)
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.finish()
        alone[name] = read_latents(driver, name)[0]
    driver = drive(DEVICES[device](), requests)
    run_all(driver, rules)
    for name, latent in alone.items():
        torch.testing.assert_close(read_latents(driver, name)[0], latent, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(alone["a"], paint("a").latent, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after", [1, 5])
def test_a_cancelled_row_gives_its_blocks_back(device, after, pictures, drive) -> None:
    driver = drive(DEVICES[device](), {name: pictures[name].request(FirstBlock(threshold=0.6)) for name in NAMES})
    for name in ("slow", "slow cfg", "c"):
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
    driver.run(steps=after)
    for name in ("slow", "slow cfg"):
        driver.cancel(name)
    driver.finish()  # proves that no block is held
    assert read_latents(driver, "c")


def test_rows_wait_for_blocks_and_nothing_changes(pictures, drive) -> None:
    """One superpage holds four blocks of 64 tokens: two rows of two planes and two branches do not fit at once."""
    rule = FirstBlock(threshold=0.6)
    names = ["slow", "slow cfg", "wide", "wide cfg"]
    requests = {name: pictures[name].request(rule) for name in names}
    roomy, tight = drive(LaggedCpu(), requests), drive(LaggedCpu(), requests, cache_bytes=1 << 14)
    for driver in (roomy, tight):
        for name in names:
            driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.finish()
    for name in names:
        latent = read_latents(tight, name)[0]
        torch.testing.assert_close(latent, read_latents(roomy, name)[0], atol=2e-5, rtol=2e-5)


def test_a_row_without_a_step_cache_needs_no_room(pictures, drive, paint) -> None:
    """The arena is full of others' blocks: a row that saves nothing runs, one that must save fails clearly."""
    requests = {"slow": pictures["slow"].request(FirstBlock(threshold=0.6)), "a": pictures["a"].request()}
    driver = drive(LaggedCpu(), requests)
    while driver.loop.site.arena.lease() is not None:
        pass
    driver.submit("a", "flux", "denoise", DenoiseWork(["a"]))
    driver.finish()
    torch.testing.assert_close(read_latents(driver, "a")[0], paint("a").latent, atol=1e-5, rtol=1e-5)
    driver.submit("slow", "flux", "denoise", DenoiseWork(["slow"]))
    driver.finish()
    assert driver.error("slow").status == 400, "what can never fit"


def test_a_poisoned_row_does_not_reach_the_next_owner_of_its_blocks(pictures, drive, paint) -> None:
    rule = FirstBlock(threshold=0.6, tail=0)
    requests = {name: pictures[name].request(rule) for name in NAMES}
    for condition in requests["a"].conditions:
        condition[flux.PROMPT].fill_(float("nan"))
    driver = drive(LaggedCpu(), requests, cache_bytes=1 << 14)
    driver.submit("a", "flux", "denoise", DenoiseWork(["a"]))
    driver.submit("slow", "flux", "denoise", DenoiseWork(["slow"]))
    driver.finish()
    assert "not finite" in driver.error("a").message
    expected = paint("slow", FirstBlockCacheConfig(threshold=0.6)).latent
    torch.testing.assert_close(read_latents(driver, "slow")[0], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_that_fails_after_its_decisions_is_repeated_with_the_same_result(device, pictures, drive, paint) -> None:
    """The join is halved like a launch; decisions stand, nothing was saved, and no row steps twice."""
    names = ["slow", "a", "c"]
    driver = drive(
        DEVICES[device](), {name: pictures[name].request(FirstBlock(threshold=0.6, tail=0)) for name in names}
    )
    model = driver.loop.programs["flux"].stage.model
    body, calls = model.body, []

    def fail_at_times(streams):
        calls.append(len(streams.hidden))
        if len(streams.hidden) > 1 and len(calls) % 3 == 0:
            raise RuntimeError("the device was busy")
        return body(streams)

    model.body = fail_at_times
    decisions = run_all(driver, names)
    for name in names:
        alone = paint(name, FirstBlockCacheConfig(threshold=0.6))
        assert decisions[name] == alone.computed
        torch.testing.assert_close(read_latents(driver, name)[0], alone.latent, atol=2e-5, rtol=2e-5)
