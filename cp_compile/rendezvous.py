"""Where the ranks of a mesh meet, outside of any collective, and learn of each other's failures.

A meeting goes through the key-value store of the process group, which is there already: nothing new is opened, and
text is all that is read from it. Each rank says something; the last to arrive compares, and writes one verdict that all
ranks follow. A verdict is written once: a rank that waited too long, or that failed on its way, writes it in place of
the last, so that two ranks can never leave one meeting with different answers.

Each rank counts its own meetings, in the store, where the count lives as long as the group does. A failure uses up one
meeting on every rank, those included that come later or learn of it from a broken collective. So after a failure the
ranks are at the same count again, and a second try meets.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from .errors import CPError, InputError, PeerError, ScheduleError
from .passes import _torch

__all__ = ["Judge", "Rendezvous", "in_short", "listed"]

Judge = Callable[[dict[int, str]], str]

_ERRORS = {kind.__name__: kind for kind in (CPError, InputError, PeerError, ScheduleError)}

# How often a waiting rank looks: at once at first, and never so seldom that an error seems late.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1

# How long a rank whose collective broke waits for the one that failed to say why.
_GRACE_S = 1.0


class Rendezvous:
    """This rank's side.

    Args:
        ranks: global ranks that must meet, the same list on each.
        rank: which of them this process is.
        timeout: seconds to wait for a rank that gives no sign of life.

    Attributes:
        out_of_step: this rank failed or was told of a failure, so what it does next must begin with a meeting.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float) -> None:
        alone = dist.get_backend() == "fake"  # its other ranks do not exist
        self.ranks = (rank,) if alone else tuple(ranks)
        self.rank, self.timeout = rank, timeout
        self.out_of_step = False
        store = dist.HashStore() if alone else _torch._get_default_store()
        self._store = dist.PrefixStore(f"cp_compile/{'-'.join(map(str, self.ranks))}", store)

    def meet(self, topic: str, said: str, judge: Judge) -> str:
        """Wait for all ranks, and come to one verdict with them.

        Args:
            topic: what the ranks are about to do, a verb first; the same on all ranks if they are in step.
            said: what this rank has to say.
            judge: called on the last rank to arrive, with what each rank said. Returns what all ranks shall know, or
                raises a :class:`CPError` that all ranks will raise.

        Returns:
            What ``judge`` returned, on every rank.

        Raises:
            CPError: what ``judge`` raised.
            PeerError: a rank failed before it came here, or the store is gone.
            ScheduleError: a rank did not come in time, or came to another meeting.
        """
        try:
            kind, text = self._meet(topic, said, judge)
        except dist.DistError as error:
            kind, text = (
                "PeerError",
                (
                    f"cp_compile: rank {self.rank} cannot reach the store of the process group any more ({error}). "
                    "Its process, usually that of rank 0, has ended: look at its output. Start all ranks anew."
                ),
            )
        self.out_of_step = bool(kind)
        if kind:
            verdict = _ERRORS[kind](text)
            verdict.everywhere = True
            raise verdict
        return text

    def get_in_step(self) -> None:
        """After a failure: go on only when all ranks have failed, or learned of it, and want to go on."""
        if self.out_of_step:
            self.meet("try again after a failure", "", lambda said: "")

    @contextlib.contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """Tell the other ranks of an error that is raised in here, unless they know."""
        try:
            yield
        except BaseException as error:
            if not getattr(error, "everywhere", False):
                self._failed(doing, error)
            raise

    def explain(self, doing: str, error: BaseException) -> PeerError | None:
        """Tell the other ranks of an error, as :meth:`telling` does.

        Returns:
            What to raise from it where it is a collective's: that is the fault of another rank, and this says which.
        """
        if getattr(error, "everywhere", False):
            return None
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
            return self._lost(doing, error)
        self._failed(doing, error)
        return None

    def _failed(self, doing: str, error: BaseException) -> None:
        text = (
            f"cp_compile: rank {self.rank} failed {doing}: {in_short(error)}\nThe output of rank {self.rank} has the "
            "traceback. Once the cause is mended, all ranks can run the model again."
        )
        self.out_of_step = True
        with contextlib.suppress(dist.DistError):
            self._next().compare_set("verdict", "", _encode("PeerError", text))

    def _lost(self, doing: str, error: BaseException) -> PeerError:
        with contextlib.suppress(dist.DistError):
            store = self._next()
            store.set(f"lost/{self.rank}", "")
            deadline = time.monotonic() + min(_GRACE_S, self.timeout)
            while not store.check(["verdict"]) and time.monotonic() < deadline:
                time.sleep(_LAST_LOOK_S)
            silent = [r for r in self.ranks if not store.check([f"lost/{r}"])]
            if silent:
                why = (
                    f"{listed(silent)} left no word: killed (by the system, for memory perhaps), busy with something "
                    "else, or still waiting for one that is. Look at what they print last"
                )
            else:
                why = "it failed on all ranks, so look at the network between them"
            text = (
                f"cp_compile: a collective failed {doing}, and {why}. A process group does not outlive this: start "
                f"all ranks anew.\nRank {self.rank} saw: {in_short(error)}"
            )
            verdict = store.compare_set("verdict", "", _encode("PeerError", text))
            self.out_of_step = True
            return PeerError(_decode(verdict)[1])
        return PeerError(
            f"cp_compile: a collective failed {doing}, and the store of the process group is gone too: the process "
            f"that holds it, usually that of rank 0, has ended. Look at its output, and start all ranks anew.\n"
            f"Rank {self.rank} saw: {in_short(error)}"
        )

    def guard(self, call: Callable[..., Any], doing: str) -> Callable[..., Any]:
        """``call``, whose errors the other ranks learn, and which learns theirs when a collective fails."""

        def run(*args: Any) -> Any:
            if self.out_of_step:
                self.get_in_step()
            try:
                return call(*args)
            except BaseException as error:
                failure = self.explain(doing, error)
                if failure is None:
                    raise
                raise failure from error

        return run

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Give signs of life in here, so that others wait for this rank however long it takes."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistError):
                while not done.wait(self.timeout / 8):
                    self._store.add(f"beat/{self.rank}", 1)

        thread = threading.Thread(target=beat, name="cp_compile beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _next(self) -> dist.Store:
        """The keys of this rank's next meeting."""
        number = self._store.add(f"meetings/{self.rank}", 1)
        return dist.PrefixStore(f"{number}", self._store)

    def _meet(self, topic: str, said: str, judge: Judge) -> tuple[str, str]:
        store = self._next()
        store.set(f"said/{self.rank}", json.dumps([topic, said]))
        if store.add("arrived", 1) == len(self.ranks) and not store.check(["verdict"]):
            heard = {r: json.loads(store.get(f"said/{r}")) for r in self.ranks}
            store.compare_set("verdict", "", _judged(heard, judge))
        self._wait(store, topic)
        return _decode(store.get("verdict"))

    def _wait(self, store: dist.Store, topic: str) -> None:
        start = time.monotonic()
        look, window = _FIRST_LOOK_S, 1
        beats: dict[int, int] = {}
        while not store.check(["verdict"]):
            if time.monotonic() - start > window * self.timeout / 2:
                missing = [r for r in self.ranks if not store.check([f"said/{r}"])]
                now = {r: self._store.add(f"beat/{r}", 0) for r in missing}
                late = [r for r in missing if now[r] == beats.get(r)]
                if late:
                    waited = time.monotonic() - start
                    text = (
                        f"cp_compile: rank {self.rank} waited {waited:.0f} s for all ranks to {topic}; "
                        f"{listed(late)} did not {topic}. Either they failed or ended before (look at their output), "
                        "or only some ranks had to compile: their inputs differ in shape, dtype or in a Python value "
                        "that Dynamo guards on. Give all ranks the same inputs; a rank that is only slow needs a "
                        "larger timeout= of the backend."
                    )
                    store.compare_set("verdict", "", _encode("ScheduleError", text))
                    return
                window, beats = window + 1, now
            time.sleep(look)
            look = min(2 * look, _LAST_LOOK_S)


def listed(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 3``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _judged(heard: dict[int, list[str]], judge: Judge) -> str:
    topics: dict[str, list[int]] = {}
    for rank, (topic, _) in heard.items():
        topics.setdefault(topic, []).append(rank)
    try:
        if len(topics) > 1:
            where = "; ".join(f"{listed(ranks)} would {topic}" for topic, ranks in topics.items())
            raise ScheduleError(
                f"cp_compile: the ranks are not at the same place: {where}. They ran different code before, or only "
                "some had to compile: give all ranks the same model, the same inputs and the same calls."
            )
        return _encode("", judge({rank: said for rank, (_, said) in heard.items()}))
    except CPError as error:
        return _encode(type(error).__name__, str(error))


def _encode(kind: str, text: str) -> str:
    return f"{kind}\n{text}"


def _decode(verdict: bytes) -> tuple[str, str]:
    kind, _, text = verdict.decode().partition("\n")
    return kind, text


def in_short(error: BaseException) -> str:
    """The error as one rank can tell it to another."""
    return f"{type(error).__name__}: {str(error).strip()[:2000]}".removesuffix(": ")
