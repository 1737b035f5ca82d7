"""The mapper: what it hides, what waits for it, what it breaks and mends, and how it ends."""

from __future__ import annotations

import random
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import run_python, start_python, until
from tests.memory.support import GROUPS, Memory, grow, make_memory
from vmserve._core import Health, MapperMode, View, ZeroPolicy

SEALS = (True, False)


def manual(**options: Any) -> Memory:
    """Nobody but the test and who has to wait executes commands; the pool is there at once."""
    wanted: dict[str, Any] = {
        "mapper": MapperMode.MANUAL,
        "zero_policy": ZeroPolicy.TENANT,
        "limit_pages": 16,
        "grow_pages": 16,
    }
    return make_memory(**{**wanted, **options})


# -- what is hidden


@pytest.mark.parametrize("seals", SEALS)
def test_growth_in_the_steady_state_calls_the_driver_in_the_background_only(seals: bool) -> None:
    memory = manual(lookahead_tokens=4, seal_read_only=seals, prefix_caching=False)
    seq = memory.start(range(1, 5))
    memory.core.run_mapper(100)
    before = memory.stat("unhidden_calls_total")
    for length in range(5, 33):
        memory.step(seq, length - 1, [length])
        memory.core.run_mapper(100)
    assert memory.read(seq) == list(range(1, 33))
    assert memory.stats("unhidden_calls_total", "mapper_waits_total") == (before, 0)
    # 7 pages are mapped ahead in each group, and 8 sealed.
    assert memory.stat("hidden_calls_total") == GROUPS * (7 + 8 * seals)
    assert memory.stat("adopted_pages_total") == 7


@pytest.mark.parametrize("seals", SEALS)
def test_who_needs_what_is_queued_executes_it(seals: bool) -> None:
    """Nobody runs the mapper: each page that was to be mapped ahead is mapped by its growth."""
    memory = manual(lookahead_tokens=4, seal_read_only=seals, prefix_caching=False)
    seq = memory.start(range(1, 5))
    before = memory.stat("unhidden_calls_total")
    for crossing, length in enumerate(range(8, 33, 4), start=1):
        memory.do(grow(seq, length))
        assert memory.stat("mapper_waits_total") == crossing
    # By the commands, but somebody waited for them; not for sealing the last two pages.
    assert memory.stat("unhidden_calls_total") - before == GROUPS * (7 + 6 * seals)
    memory.core.settle_mapper()
    assert memory.stat("hidden_calls_total") == GROUPS * 2 * seals
    memory.core.check()


def test_growth_does_not_wait_for_seals_and_commands_run_only_so_many() -> None:
    memory = manual(lookahead_tokens=4, prefix_caching=False)
    seq, other = memory.open(range(4)), memory.open(range(4))
    memory.do(grow(seq, 3), grow(other, 3))
    assert [memory.core.run_mapper(most) for most in (1, 100, 100)] == [1, 1, 0]
    assert memory.stat("hidden_calls_total") == 2 * GROUPS  # the next pages are mapped
    memory.do(grow(seq, 4), grow(other, 4))  # the first pages are to be sealed
    memory.do(grow(seq, 5))
    assert memory.stat("mapper_waits_total") == 0


@pytest.mark.parametrize("ready", [0, 1])
def test_where_pages_are_kept_ready_each_growing_sequence_has_one(ready: int) -> None:
    pages = {"ready_pages": ready, "grow_pages": 1, "limit_pages": 64, "max_pages": 64}
    memory = manual(**pages, num_slots=6, prefix_caching=False)
    seqs = [memory.start([1]) for _ in range(6)]  # one after the other: a step takes one page
    for length in (2, 3):
        memory.core.run_mapper(100)
        memory.do(*(grow(seq, length) for seq in seqs))
    memory.core.run_mapper(100)
    assert (memory.stat("free_pages") >= 6) == bool(ready)
    memory.core.check()


def test_eager_slots_are_mapped_in_the_background_and_adopted() -> None:
    memory = manual(eager_slots=1, eager_pages=2, prefix_caching=False)
    paged = memory.start([1], View.PAGED)
    assert memory.core.run_mapper(100) == 1
    assert memory.stats("parked_slots", "parked_pages") == (1, 2)
    before = memory.stat("unhidden_calls_total")
    memory.grown(8, range(1, 9))
    assert memory.stat("unhidden_calls_total") == before
    assert memory.stats("adopted_slots_total", "adopted_pages_total") == (1, 2)
    # The next one is made ready, once.
    memory.core.run_mapper(100)
    memory.do(grow(paged, 2))
    memory.core.run_mapper(100)
    assert memory.stats("parked_slots", "parked_pages") == (1, 2)
    memory.core.check()


def test_what_newcomers_take_is_learnt_and_mapped_for_the_next_ones() -> None:
    memory = manual(eager_slots=2, lookahead_tokens=4, num_slots=2, limit_pages=32)
    first = memory.start(range(1, 13), tenant=1)  # three pages
    memory.core.run_mapper(100)
    assert memory.stats("parked_slots", "parked_pages") == (1, 3)
    before = memory.stat("unhidden_calls_total")
    second = memory.grown(12, range(21, 33), tenant=1)
    assert memory.stats("unhidden_calls_total", "adopted_pages_total") == (before, 3)
    # No slot is empty when the first one is parked with its prefix: it is unmapped for the next.
    memory.core.run_mapper(100)
    memory.release(first)
    for length in (13, 14, 15):
        memory.do(grow(second, length))
        memory.core.run_mapper(100)
    memory.grown(12, range(41, 53), tenant=1)
    assert memory.stat("unhidden_calls_total") == before
    assert memory.core.match(memory.open(range(1, 13), tenant=1)) == 8  # cached all the same
    memory.core.check()


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_mapping_ahead_keeps_up_with_steady_traffic(view: View) -> None:
    """Eight clients, a growing pool that reaches its limit, prompts that nobody has in common."""
    memory = manual(
        limit_pages=512, max_pages=512, grow_pages=8, num_slots=16, max_seqs=16, max_len=256,
        lookahead_tokens=4, eager_slots=4,
    )  # fmt: skip
    rng = random.Random(1)
    running: dict[int, int] = {}  # sequence -> the length at which it ends
    num_opened = 0
    for step in range(1200):
        ops = []
        for seq in list(running):
            if (length := memory.core.length(seq)) == running[seq]:
                memory.release(seq)
                del running[seq]
                continue
            ops.append(grow(seq, length + 1))
        if len(running) < 8 and step % 2 == 0:
            num_opened += 1
            prompt = [num_opened] * rng.randint(4, 32)
            seq = memory.open(prompt, view)
            running[seq] = len(prompt) + rng.randint(8, 96)
            ops.append(grow(seq, len(prompt)))
        epoch = memory.begin(*ops)
        grown = [op[1] for op in ops]
        memory.core.append_tokens(grown, [step] * len(grown))
        memory.core.run_mapper(100)
        memory.core.complete(epoch)
        if step == 100:
            start = np.array(memory.stats("unhidden_calls_total", "hidden_calls_total"))
    assert memory.stat("committed_pages") == 512
    assert memory.stat("evicted_blocks_total") > 500
    unhidden, hidden = memory.stats("unhidden_calls_total", "hidden_calls_total") - start
    assert hidden > 0
    assert unhidden <= 0.02 * (hidden + unhidden)
    memory.core.check()


def test_parked_slots_are_unmapped_before_anybody_waits_for_their_pages() -> None:
    memory = manual(limit_pages=12, grow_pages=12, reclaim_share=0.5, prefix_caching=False)
    seqs = [memory.start(range(1, 17)), memory.start(range(21, 37))]
    memory.core.settle_mapper()
    memory.release(*seqs)
    assert memory.stats("parked_pages", "free_pages", "idle_pages") == (8, 4, 8)
    before = memory.stat("unhidden_calls_total")
    memory.start([1], View.PAGED)  # leaves 3 at hand, where 6 are wanted
    assert memory.stats("parked_pages", "held_pages") == (5, 3)
    assert memory.core.run_mapper(100) == 1
    assert memory.stats("parked_pages", "free_pages", "held_pages") == (5, 6, 0)
    assert memory.stat("unhidden_calls_total") == before
    memory.core.check()


# -- what fails


def prepare(kind: str) -> tuple[Memory, list[int]]:
    """A memory with exactly one command of the kind queued, and its open sequences."""
    wanted: dict[str, dict[str, Any]] = {
        "map": {"lookahead_tokens": 4},
        "unmap": {"limit_pages": 12, "grow_pages": 12, "reclaim_share": 0.5},
        "grow": {"grow_pages": 4},
        "seal": {},
    }
    memory = manual(prefix_caching=False, seal_read_only=kind == "seal", **wanted[kind])
    if kind == "grow":
        memory.do(grow(memory.open(range(1, 13)), 12))  # one page of four is left
        assert memory.stat("held_pages") == 4
        return memory, sorted(memory.seqs)
    if kind == "unmap":
        memory.release(*[memory.start(range(first, first + 16)) for first in (1, 21)])
    return memory, [memory.start(range(1, 5), View.PAGED if kind == "unmap" else View.VIRTUAL)]


KINDS = ("map", "unmap", "grow", "seal")
PLANS = [(call, forever) for call in (1, 2, 3, 4) for forever in (False, True)]


@pytest.mark.parametrize(("call", "forever"), PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_fails_costs_nothing_for_long(kind: str, call: int, forever: bool) -> None:
    """What it leaves half done is set aside, and mended when the driver lets us."""
    memory, seqs = prepare(kind)
    content = {seq: memory.read(seq) for seq in seqs if kind != "grow"}
    state = memory.state()
    memory.faults.arm(call, forever=forever)
    assert memory.core.run_mapper(100) == 1
    met = memory.faults.num_calls >= call
    memory.faults.disarm()
    stats = memory.core.stats()
    assert stats.health is (Health.DEGRADED if stats.pending_repairs else Health.HEALTHY)
    if forever and call > 1 and met and kind != "unmap":
        assert stats.pending_repairs == 1  # what was done could not be undone
    if kind == "unmap" and met:
        assert (stats.pending_repairs, stats.quarantined_pages) == (1, 3)
    assert ("injected fault" in memory.core.last_error()) == met
    memory.core.check()
    kept = memory.state()
    for name in ("blocks", "lengths", "sealed", "slots", "used_pages"):
        assert kept[name] == state[name], name
    assert {seq: memory.read(seq) for seq in content} == content
    # The next step mends it, and everybody can go on.
    for seq in seqs:
        memory.do(grow(seq, memory.core.length(seq) + 4))
    memory.core.settle_mapper()
    assert memory.stats("pending_repairs", "quarantined_pages") == (0, 0)
    assert memory.core.stats().health is Health.HEALTHY
    memory.core.check()
    memory.release(*seqs)
    memory.core.complete(memory.core.begun_epoch)
    memory.core.trim(0, drop_idle=True)
    assert memory.stats("committed_pages", "memfd_allocated_bytes") == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_that_never_comes_back_degrades_the_pool_and_no_more(kind: str) -> None:
    memory, seqs = prepare(kind)
    memory.faults.arm(2, forever=True)
    memory.core.run_mapper(100)
    for _ in range(3):
        for seq in seqs:
            same = [grow(seq, memory.core.length(seq))]
            memory.core.complete(memory.core.apply(same, memory.core.plan(same).version))
    assert memory.core.stats().health is Health.DEGRADED
    memory.core.check()
    memory.faults.disarm()
    memory.core.trim(0, drop_idle=True)
    assert memory.core.stats().health is Health.HEALTHY


def test_a_lost_device_ends_the_pool() -> None:
    memory, [seq] = prepare("map")
    memory.faults.arm(1, sticky=True)
    memory.core.run_mapper(100)
    assert memory.core.stats().health is Health.FAILED
    with pytest.raises(OSError, match="has failed and serves no more"):
        memory.begin(grow(seq, 5))
    memory.release(seq)


# -- how it ends


def test_close_with_commands_queued_ends_all_calls() -> None:
    memory = manual(lookahead_tokens=4)
    seq = memory.start(range(1, 5))
    line = memory.core.slots_buffer(0)[0]
    memory.core.close()
    assert memory.core.closed
    for call in (memory.core.stats, memory.core.settle_mapper, lambda: memory.core.release(seq)):
        with pytest.raises(ValueError, match="this KV memory is closed"):
            call()
    assert line[0] == 1  # the memory goes with its last array
    memory.core.close()


PRELUDE = """
import os, random, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from tests.memory.support import grow, make_memory
from vmserve._core import MapperMode, View, ZeroPolicy

def threaded(**options):
    return make_memory(
        mapper=MapperMode.THREAD, lookahead_tokens=4, eager_slots=1, eager_pages=2,
        reclaim_share=0.3, zero_policy=ZeroPolicy.TENANT, **options,
    )

def step(core, *ops):
    # Others may change something between the plan and its execution.
    while True:
        plan = core.plan(ops)
        if not plan.fits:
            return False
        try:
            core.complete(core.apply(ops, plan.version))
            return True
        except ValueError as error:
            assert "stale" in str(error), error

def live(core, rng, steps):
    lengths = {}
    for _ in range(steps):
        if len(lengths) < 4:
            view = rng.choice([View.VIRTUAL, View.VIRTUAL, View.PAGED])
            lengths[core.open(0, view, b"", [1] * 32)] = 0
        seq = rng.choice(list(lengths))
        if lengths[seq] < 30 and step(core, grow(seq, lengths[seq] + rng.choice([1, 1, 2]))):
            lengths[seq] = core.length(seq)
        else:
            core.release(seq)
            del lengths[seq]
    return lengths
"""


DONE = 'print("done", flush=True)'


def run(code: str) -> None:
    done = run_python(PRELUDE + textwrap.dedent(code))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_step_and_other_threads_do_not_disturb_each_other() -> None:
    run(
        """
        sys.setswitchinterval(1e-6)
        memory = threaded()
        core, over = memory.core, threading.Event()

        def others(seed):
            rng = random.Random(seed)
            waiting = core.open(seed, View.VIRTUAL, b"", [1] * 32)
            while not over.is_set():
                draw = rng.random()
                if draw < 0.4:
                    assert core.stats().committed_pages <= 16
                elif draw < 0.7:
                    core.match(waiting)
                elif draw < 0.8:
                    core.trim(rng.randint(0, 4), rng.random() < 0.5)
                elif draw < 0.9:
                    core.settle_mapper()
                else:
                    core.check()

        with ThreadPoolExecutor(3) as threads:
            all_others = [threads.submit(others, seed) for seed in range(3)]
            try:
                live(core, random.Random(0), 300)
            finally:
                over.set()
        for each in all_others:
            each.result()
        core.check()
        print("done")
        """
    )


def test_no_command_is_forgotten() -> None:
    """Between waking up and finding the queue empty nothing gets lost: settling always ends."""
    run(
        """
        memory = threaded()
        rng = random.Random(0)
        for round in range(150):
            lengths = live(memory.core, rng, 4)
            if round % 3 == 0:
                time.sleep(0)  # lets the mapper go to sleep now and then
            memory.core.settle_mapper()
            assert memory.core.run_mapper(100) == 0
            assert memory.core.stats().held_pages == 0
            for seq in lengths:
                memory.core.release(seq)
        stats = memory.core.stats()
        assert stats.hidden_calls_total + stats.unhidden_calls_total > 100
        memory.core.check()
        print("done")
        """
    )


def test_what_is_queued_is_executed_without_anybody_asking() -> None:
    memory = manual(mapper=MapperMode.THREAD, lookahead_tokens=4)
    memory.start([1])
    until(lambda: memory.stat("hidden_calls_total") > 0)


def test_closing_while_the_mapper_works() -> None:
    run(
        """
        for seed in range(120):
            memory = threaded()
            live(memory.core, random.Random(seed), 3)
            if seed % 2:
                memory.core.close()
            del memory
        print("done")
        """
    )


BUSY = """
# Where the tests run in the background of a shell, interrupts are ignored from the start.
signal.signal(signal.SIGINT, signal.default_int_handler)
memory = threaded()
print("ready", flush=True)
while True:
    for seq in live(memory.core, random.Random(0), 50):
        memory.core.release(seq)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_though_the_mapper_is_busy(number: signal.Signals) -> None:
    shared = sorted(Path("/dev/shm").iterdir())
    with start_python(PRELUDE + BUSY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=110)
    interrupted = (1, 130, -signal.SIGINT)
    assert process.returncode in ((-number,) if number == signal.SIGTERM else interrupted), err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert sorted(Path("/dev/shm").iterdir()) == shared


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", ""])
def test_the_process_ends_though_the_mapper_is_busy(how: str) -> None:
    shared = sorted(Path("/dev/shm").iterdir())
    run(f"memory = threaded()\nlive(memory.core, random.Random(0), 40)\n{DONE}\n{how}")
    assert sorted(Path("/dev/shm").iterdir()) == shared


@pytest.mark.parametrize(
    "ends", ["os._exit(0)", "sys.exit(0)", "del call, calls, memory, core; sys.exit(0)"]
)
@pytest.mark.slow
def test_a_fork_is_refused_and_ends(ends: str) -> None:
    """The mapper's thread does not exist in it, and nobody waits for it there."""
    run(
        f"""
        memory = threaded()
        core = memory.core
        live(core, random.Random(0), 20)
        child = os.fork()
        if child == 0:
            calls = [core.stats, core.settle_mapper, lambda: core.run_mapper(1), core.open]
            calls += [lambda: core.release(0), lambda: core.trim(0)]
            for call in calls:
                try:
                    call()
                except ValueError as error:
                    assert "was used in its fork" in str(error), error
                else:
                    os._exit(3)
            core.close()  # does nothing: it is the parent's
            {ends}
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, status
        live(core, random.Random(1), 20)
        core.check()
        print("done")
        """
    )
