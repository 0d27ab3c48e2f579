"""Classes that job files name: found beside the job file, refused with their dotted path, recorded by digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, validate
from configs.method import MethodConfig
from pipeline.formats import kind_of
from pipeline.run.external_parts import (
    METRIC,
    check_contracts,
    external_names,
    install_external,
    install_recorded,
    parts_of,
    suite_of,
)
from tests.pipeline.attempts import job, plan_of

PART = """
from decoding.drafters import LookupDrafter
from decoding.trees import Chain
from decoding.acceptance import Exact, RandomRelaxation

class Mine(LookupDrafter):
    def __init__(self, tokens: int = 2) -> None:
        super().__init__(1, tokens)

class Wide(LookupDrafter):
    def draft(self, slots, frontier):
        return super().draft(slots, frontier).repeat(1, 1, 2)

class Nameless(LookupDrafter):
    name = "none"

class Abstract(Chain):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.max_nodes = "many"

class Lossy(RandomRelaxation):
    pass

class Unfinished(__import__("decoding.contracts").contracts.Drafter):
    name = "unfinished"

class Unborn(LookupDrafter):
    def __init__(self) -> None:
        super().__init__()
        unknown_name

number = 3

def loss(own, plain):
    return 0.0
"""


def method(drafter: Any = "mine_parts:Mine", **parts: Any) -> MethodConfig:
    drafter = {"kind": drafter} if isinstance(drafter, str) else drafter
    return validate(MethodConfig, {"drafter": drafter, **parts}, "job.yaml")


def installed(chosen: MethodConfig, folder: Path) -> MethodConfig:
    (folder / "mine_parts.py").write_text(PART)
    install_external(dict(parts_of(chosen.places)), folder)
    return chosen


def test_parts_of_ours_are_no_external_code() -> None:
    plain = validate(MethodConfig, {"drafter": {"kind": "lookup"}}, "job.yaml")
    assert dict(parts_of(plain.places)) == {}
    check_contracts(plain.places)


def test_names_have_the_dotted_paths_of_the_job_file(tmp_path: Path) -> None:
    rule = {"kind": "b:Rule", "lossless": False}
    config = job(
        {"kind": "text", "path": str(tmp_path)},
        tmp_path / "out",
        method={"drafter": {"kind": "a:D"}, "tree": {"kind": "a:T"}, "acceptance": rule},
        audit={"share": 0.1, "metric": "c:loss"},
    )
    expected = {"method.drafter": "a:D", "method.tree": "a:T", "method.acceptance": "b:Rule", METRIC: "c:loss"}
    assert external_names(config) == expected
    assert (config.method.label, config.method.verify_mode) == ("D+T+Rule", "lossy")
    auto = {"auto": {"candidates": [{"drafter": {"kind": "lookup"}}, {"drafter": {"kind": "a:D"}}]}}
    tried = validate(MethodConfig, auto, "job.yaml")
    assert dict(parts_of(tried.places)) == {"method.auto.candidates.1.drafter": "a:D"}


def test_a_part_is_found_beside_the_job_file_and_recorded(tmp_path: Path) -> None:
    chosen = installed(method({"kind": "mine_parts:Mine", "options": {"tokens": 3}}), tmp_path)
    check_contracts(chosen.places)
    [(where, text)] = install_external(dict(parts_of(chosen.places)), tmp_path).items()
    assert where == "method.drafter"
    assert text.startswith("mine_parts:Mine sha256:")
    assert len(text) == len("mine_parts:Mine sha256:") + 64
    drafter = suite_of(chosen).make_method().drafter
    assert (drafter.name, drafter.max_ngram_tokens) == ("lookup", 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"drafter": "mine_parts:Missing"}, r"method.drafter.kind: .* has no 'Missing'; it has Abstract, Chain"),
        (
            {"drafter": "mine_parts:number"},
            r"is int, and it must be a subclass of draftfleet.decoding.contracts.Drafter",
        ),
        ({"drafter": "mine_parts:Chain"}, "is the class Chain, and it must be a subclass of .*Drafter"),
        (
            {"drafter": "mine_parts:Unfinished"},
            "cannot be made: TypeError: Can't instantiate abstract class Unfinished",
        ),
        ({"drafter": "mine_parts:Nameless"}, "name is 'none', which is the name of plain decoding"),
        (
            {"drafter": {"kind": "mine_parts:Mine", "options": {"depth": 1}}},
            "method.drafter.options: mine_parts:Mine refuses them: TypeError: .*unexpected keyword argument 'depth'",
        ),
        (
            {"drafter": "mine_parts:Unborn"},
            r"method.drafter.kind: mine_parts:Unborn cannot be made: NameError: .*mine_parts.py, line \d+$",
        ),
        ({"tree": {"kind": "mine_parts:Mine"}}, "method.tree.kind: .* must be a subclass of .*TreePolicy"),
        (
            {"tree": {"kind": "mine_parts:Abstract", "options": {"length": 2}}},
            "method.tree.kind: mine_parts:Abstract has no attribute 'max_nodes' of type int",
        ),
        (
            {"acceptance": {"kind": "mine_parts:Lossy", "options": {"probability": 0.5}, "lossless": True}},
            "method.acceptance.lossless: is True, and mine_parts:Lossy.lossless is False",
        ),
        (
            {"drafter": "mine_parts:Wide"},
            r"method: mine_parts:Wide fails the check 'greedy tokens, batch 3' .* shape \(3, 1, 128\)",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parts_that_break_the_contract_are_refused_before_the_job(
    tmp_path: Path, parts: dict[str, Any], reason: str
) -> None:
    chosen = installed(method(**parts), tmp_path)
    with pytest.raises(ConfigError, match=reason):
        check_contracts(chosen.places)


def test_a_module_that_does_not_exist_is_refused_with_the_dotted_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.drafter: nowhere_mine:D: there is no module 'nowhere_mine'"):
        install_external(dict(parts_of(method("nowhere_mine:D").places)), tmp_path)


def test_an_output_is_read_again_with_the_code_of_its_source_and_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_parts.py").write_text(PART)
    config = job({"kind": "mine_parts:number", "path": str(tmp_path)}, tmp_path / "out")
    code = install_external(external_names(config), None)["source.kind"]
    install_recorded(config, code)
    (tmp_path / "mine_parts.py").write_text(PART + "# changed")
    reason = r"source.kind: the output was made by mine_parts:number sha256:\w{64}, and now"
    with pytest.raises(ConfigError, match=reason):
        install_recorded(config, code)
    (tmp_path / "mine_parts.py").unlink()
    with pytest.raises(ConfigError, match=r"source.kind: mine_parts:number: there is no module 'mine_parts'"):
        install_recorded(config, code)


def test_a_source_kind_that_is_no_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine_parts.py").write_text(PART)
    install_external({"source.kind": "mine_parts:number"}, tmp_path)
    with pytest.raises(ConfigError, match=r"source.kind: mine_parts:number is int, and it must be a .*\.SourceKind"):
        kind_of("mine_parts:number")


FORMAT = """
from pipeline.formats.lines import LineFormat

class Pairs(LineFormat):
    name = "pairs"
    suffixes = (".pairs",)

    def select(self, filesystem, root, files, needs):
        needs.require(["text"], "a file of pairs")

    def parser(self, filesystem, spec, path):
        return lambda record: {"text": record.text(self.max_bytes)}

KIND = Pairs().kind
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", ""),
        ("needs.requires", r"'Needs' object has no attribute 'requires'.*; .*mine_format.py, line 9"),
        ("self.max_byte)", r"'Pairs' object has no attribute 'max_byte'.*; .*mine_format.py, line 12"),
        ("parser(self, spec, path)", r"TypeError: .*positional arguments"),
    ],
)
def test_a_fault_of_a_format_is_refused_with_its_line(tmp_path: Path, fault: str, reason: str) -> None:
    right = {"needs.requires": "needs.require", "self.max_byte)": "self.max_bytes)"}
    right["parser(self, spec, path)"] = "parser(self, filesystem, spec, path)"
    (tmp_path / "mine_format.py").write_text(FORMAT.replace(right[fault], fault) if fault else FORMAT)
    (tmp_path / "a.pairs").write_text("first\nsecond\n")
    config = job({"kind": "mine_format:KIND", "path": str(tmp_path / "a.pairs")}, tmp_path / "out")
    install_external(external_names(config), tmp_path)
    if not fault:
        assert plan_of(config).datasource.num_samples == 2
        return
    with pytest.raises(ConfigError, match=f"^source.kind: the code of mine_format:KIND raised .*{reason}"):
        plan_of(config)


@pytest.mark.parametrize("kind", ["m:", ":C", "m:C.d", "m n:C", "m-x:C", f"{'m' * 200}:C"])
def test_kinds_that_name_no_class_are_refused(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"drafter.kind: (must name a class as module:Class|String should have at most)"
    ):
        method(kind)


def test_a_kind_of_ours_is_still_checked_against_our_kinds() -> None:
    with pytest.raises(
        ConfigError, match=r"drafter: Input tag 'looku' found using 'kind' does not match .* 'none', 'model'"
    ):
        method("looku")
    with pytest.raises(ConfigError, match=r"job.yaml: drafter: Input should be"):
        validate(MethodConfig, {"drafter": 3}, "job.yaml")
    with pytest.raises(ConfigError, match=r"drafter.max_ngrams: is not a known key"):
        method({"kind": "lookup", "max_ngrams": 3})
    with pytest.raises(ConfigError, match=r"drafter.option: is not a known key"):
        method({"kind": "a:B", "option": {}})
