"""FrozenLake as a multi-turn text game: maps, words and episodes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from gymnasium.wrappers import TimeLimit

from fastadv import Ending, Outcome

NUM_MAPS = 512
SIZES = (4, 5, 6)  # tiles a side, by map id: small maps bring the first rewards, large ones leave something to learn
FROZEN = 0.85  # probability that a tile is ice and not a hole
SUCCESS_RATE = 0.8  # probability that an action moves the agent where it says, and not to one of the two sides
MAX_TURNS = 12

BOS = "<bos>"
ACTIONS = ("L", "D", "R", "U")  # in gymnasium's numbering
SIDES = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}  # (rows, columns) to the tile, in the order of ACTIONS
EDGE = "#"
WORDS = (
    BOS,
    *ACTIONS,
    *(f"row{i}" for i in range(max(SIZES))),
    *(f"col{i}" for i in range(max(SIZES))),
    *(side + tile for side in SIDES for tile in "SFHG" + EDGE),  # the side in the word: learned faster than by position
)
WORD_IDS = {word: i for i, word in enumerate(WORDS)}
ACTION_IDS = tuple(WORD_IDS[action] for action in ACTIONS)
TURN_TOKENS = 3 + len(SIDES)  # previous action or <bos>, row, column, the four tiles around

OUTCOMES = {
    "GoalReached": Outcome.SOLVED,
    "FellIntoHole": Outcome.FAILED,
    "MalformedAction": Outcome.FAILED,
    "TimeLimitExceeded": Outcome.BUDGET,
}
ENDINGS = {
    "GoalReached": Ending.ENVIRONMENT,
    "FellIntoHole": Ending.ENVIRONMENT,
    "MalformedAction": Ending.VOID,
    "TimeLimitExceeded": Ending.TURN_CAP,  # gymnasium's time is turns
}


def encode(words: Iterable[str]) -> list[int]:
    """Ids of words, all of them in WORDS."""
    return [WORD_IDS[word] for word in words]


def decode(ids: Iterable[int]) -> list[str]:
    """Words of ids."""
    return [WORDS[i] for i in ids]


@functools.cache
def lake(map_id: int) -> FrozenLakeEnv:
    """The environment of map 0 .. NUM_MAPS - 1, made once."""
    board = generate_random_map(size=SIZES[map_id % len(SIZES)], p=FROZEN, seed=map_id)
    return FrozenLakeEnv(desc=board, is_slippery=True, success_rate=SUCCESS_RATE)


def observe(board: Sequence[Sequence[bytes]], row: int, column: int) -> list[str]:
    """What the agent sees from a tile: row, column, and the tiles to the left, below, to the right and above.

    Args:
        board: `[side, side]`, each tile one of S, F, H and G.
        row, column: where the agent is, from 0.

    Returns:
        TURN_TOKENS - 1 words.
    """
    side = len(board)

    def tile(y: int, x: int) -> str:
        return board[y][x].decode() if 0 <= y < side and 0 <= x < side else EDGE

    around = [name + tile(row + down, column + right) for name, (down, right) in SIDES.items()]
    return [f"row{row}", f"col{column}", *around]


class Episode:
    """One walk over a map.

    Attributes:
        map_id: the map.
        block: TURN_TOKENS ids that the policy reads next: its previous action or `<bos>`, then the observation. After
            the end it is what the policy read last.
        exit_status: why the episode is over, a key of OUTCOMES; None while it runs.
    """

    def __init__(self, map_id: int, seed: int):
        self.map_id = map_id
        self.exit_status: str | None = None
        # The copy shares the map's transition tables and has a position and a random generator of its own.
        self._env = TimeLimit(copy.copy(lake(map_id)), MAX_TURNS)
        state, _ = self._env.reset(seed=seed)
        self.block = self._read(WORD_IDS[BOS], state)

    def act(self, token: int) -> None:
        """Takes the action that a sampled token stands for; a token that is no action ends the episode.

        Raises:
            RuntimeError: the episode is over.
        """
        if self.exit_status is not None:
            raise RuntimeError(f"the episode on map {self.map_id} is over: {self.exit_status}")
        if token not in ACTION_IDS:
            self.exit_status = "MalformedAction"
            return
        state, reward, terminated, truncated, _ = self._env.step(ACTION_IDS.index(token))
        if terminated:  # before the limit: reaching the goal in the last turn counts
            self.exit_status = "GoalReached" if reward else "FellIntoHole"
        elif truncated:
            self.exit_status = "TimeLimitExceeded"
        else:
            self.block = self._read(token, state)

    def _read(self, previous: int, state: int) -> list[int]:
        lake: Any = self._env.unwrapped  # gymnasium's type does not say that it has a map
        board = lake.desc
        return [previous, *encode(observe(board, *divmod(state, len(board))))]
