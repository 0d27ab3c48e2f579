"""Several captions of one prompt: rows, ids, noise, errors, resume, and one pass of the vision tower."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from actors.generate import Generate
from actors.results import Stamp
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from pipeline.manifest.done_bitmap import PathIndex
from pipeline.output.accounts import Accounts, locate
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import job_schema
from tests import toys
from tests.actors.fakes import FakeEngine, FakePair, complete, decoded_table, fake_job
from tests.actors.test_generate import run
from tests.conformance import checks

NUM = 3


class Recording(FakePair):
    """Records requests; the text of a request is drawn from its id, replica and attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def engine(self, slots: int) -> FakeEngine:
        pair = self

        class Drawing(FakeEngine):
            def finish(self, request: Request) -> Any:
                from dataclasses import replace

                pair.requests.append(request)
                text = f"{random.Random(f'{request.sample_id}/{request.replica}/{request.attempt}').random():.6f}"
                return replace(complete(request), text=text, attempt=request.attempt)

        return Drawing(slots)


def job(**sections: Any) -> CaptionJobConfig:
    return fake_job(**{"sampling": {"num_captions_per_prompt": NUM, "temperature": 0.7}, **sections})


def captions(table: pa.Table, pair: FakePair | None = None, **options: Any) -> list[dict[str, Any]]:
    config = job()
    loaded = pair or Recording()
    actor = Generate(
        config, job_schema(config), Stamp("job-1", 1, "f00d"), load=lambda own, threads: loaded, **options
    )
    return [row for result in run(actor, table) for row in result.to_pylist()]


def test_a_prompt_becomes_as_many_rows_with_ids_replicas_and_noise_of_their_own() -> None:
    pair = Recording()
    rows = captions(decoded_table([{"id": "a", "text": "x", "grey": 3}, {"id": "b", "text": "y"}]), pair)
    names = [f"{name}#{replica}" for name in ("a", "b") for replica in range(NUM)]
    assert [row["sample_id"] for row in rows] == names
    assert [row["replica"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["row_index"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["generated_text"] for row in rows] == [
        f"{random.Random(f'{name}/{index % NUM}/0').random():.6f}" for index, name in enumerate(names)
    ]
    assert len({(request.seed, request.sample_id, request.replica) for request in pair.requests}) == 2 * NUM
    first = [request for request in pair.requests if request.sample_id.startswith("a#")]
    assert all(request.images[0] is first[0].images[0] for request in first), "captions of a prompt share its pixels"


def test_captions_that_the_output_has_are_not_made_again() -> None:
    table, present = decoded_table([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]), frozenset(("a#1", "b#2"))
    pair = Recording()
    whole = {row["sample_id"]: row["generated_text"] for row in captions(table)}
    rest = {row["sample_id"]: row["generated_text"] for row in captions(table, pair, present=present)}
    assert rest == {name: text for name, text in whole.items() if name not in present}
    assert sorted(request.sample_id for request in pair.requests) == sorted(rest)


def test_a_row_that_cannot_run_becomes_as_many_error_rows() -> None:
    rows = captions(decoded_table([{"id": "bad", "error": "broken_image"}, {"id": "no", "text": "REFUSE"}]))
    assert [(row["sample_id"], row["replica"], row["error_type"]) for row in rows] == [
        *(("bad#0", 0, "broken_image"), ("bad#1", 1, "broken_image"), ("bad#2", 2, "broken_image")),
        *(("no#0", 0, "prompt_refused"), ("no#1", 1, "prompt_refused"), ("no#2", 2, "prompt_refused")),
    ]


def test_row_options_reach_every_caption() -> None:
    rows = captions(decoded_table([{"id": "a", "text": "x", "sampling": '{"seed": 9}'}]))
    assert [row["seed"] for row in rows] == [9, 9, 9]


def test_a_sample_is_done_when_all_of_its_captions_are_there() -> None:
    rows = captions(decoded_table([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]))
    table = pa.Table.from_pylist(rows, job_schema(job()))
    index = PathIndex(pa.chunked_array([["shard-0"]]))
    accounts = Accounts(np.array([2]), NUM)
    for kept in ([0, 1, 2, 3], [5]):
        accounts.add(locate([table.take(pa.array(kept))], index))
    assert accounts.present_ids() == {"b#0", "b#2"}
    assert accounts.done().has(np.array([0, 0]), np.array([0, 1])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampling": {"num_captions_per_prompt": 2}}, "is 2, and at temperature 0 all are the same caption"),
        ({"columns": {"prompts": "asked"}, "prompt": "{prompt}"}, r"is 3, and columns\.prompts has several prompts"),
        (
            {"source": {"kind": "videos", "path": "in", "video": {"clip_s": 2.0}}},
            r"is 3, and source\.video\.clip_s makes several clips",
        ),
        ({"sampling": {"num_captions_per_prompt": 0}}, r"sampling\.num_captions_per_prompt: Input should be greater"),
    ],
)
def test_captions_that_would_be_equal_or_not_the_only_rows_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(CaptionJobConfig, job().resolved() | sections, "a test")


def test_the_number_of_captions_is_content_only_where_it_is_set() -> None:
    assert "num_captions_per_prompt" not in fake_job().content({})["sampling"]
    assert job().content({})["sampling"]["num_captions_per_prompt"] == NUM


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_captions_share_one_vision_pass_and_equal_runs_of_their_own(slots: int) -> None:
    target = toys.target("llava")
    target.keep_features(1 << 20)
    tower = next(module for name, module in target.model.named_modules() if name.endswith("vision_tower"))
    passes: list[int] = []
    hook = tower.register_forward_hook(lambda *_: passes.append(1))
    text, images = toys.prompt("llava", 2)
    sampling = Sampling(max_new_tokens=9, temperature=0.9, ignore_eos=True)
    wanted = [Request(f"a#{i}", text, images, sampling, seed=3, replica=i) for i in range(6)]
    engine = Engine(target, Method(checks.make_drafter("none", "llava"), checks.TREES["chain"](), Exact()), slots, 128)
    done = checks.run(engine, wanted)
    hook.remove()
    assert len(passes) == 1
    tokens = [done[request.sample_id].token_ids for request in wanted]
    assert tokens == [checks.referenced("llava", request, target.eos_ids) for request in wanted]
    assert len(set(tokens)) > 3


def test_the_captions_of_a_sample_count_as_one_input() -> None:
    rows = captions(decoded_table([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]))
    totals = Summary("job-1", "chain", "lossless", 1.0)
    totals.add_rows(pa.Table.from_pylist(rows, job_schema(job())))
    assert (totals.num_samples, totals.num_inputs) == (2 * NUM, 2)
