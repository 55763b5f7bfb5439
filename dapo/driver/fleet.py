"""Starts and stops Ray, engines, reward workers and actors. They are composed only here. Every process ends with its
context. A run of one half (`trainer.only`) has no processes for the other."""

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import ray

from dapo.config.derived import device_of, lends, lent_engines, shares_gpus
from dapo.config.schema import Config
from dapo.driver.fixed_policy import FixedPolicy
from dapo.driver.scaling import Scaling
from dapo.ground.console import say, warn
from dapo.ground.signals import finish
from dapo.ground.watchdog import waiting
from dapo.pools import Pools
from dapo.pools import RolloutPool as Rollouts
from dapo.sampling.lender import Lender
from dapo.workers.actor import ActorPool
from dapo.workers.cluster import connect, going_nodes, leave
from dapo.workers.engines.arguments import engine_args
from dapo.workers.judge import JudgePool
from dapo.workers.placement import Placement
from dapo.workers.placing.asked import count_gpus, judge_device, reward_model_device
from dapo.workers.reward import RewardPool
from dapo.workers.reward_model import RewardModelPool
from dapo.workers.rollout import RolloutPool
from dapo.workers.trajectories import TrajectoryPool
from dapo.workers.turns import TurnFleet
from dapo.workers.weight_sync import NoSync, WeightSync

STOP_GRACE_S = 3.0


@contextmanager
def ray_cluster(cfg: Config) -> Iterator[None]:
    """Joins or starts Ray; leaves or stops it at the end."""
    # asyncio would report the waits on Ray that a failure or signal cancels at exit, each with a traceback.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with waiting("Ray to start, or to be joined"):
        keeps = cfg.checkpoint.memory_copies > 0
        connect(cfg.trainer.ray_address, worker_logs=cfg.logging.worker_logs, keeps=keeps)
    try:
        yield
    finally:
        leave()


async def place(cfg: Config, device: str) -> Placement:
    """Finds a place for every role, in a thread: it may take long, and a cancelled run must stop waiting."""
    given_up = threading.Event()
    finding = asyncio.to_thread(Placement, cfg, device, warn=warn, say=say, given_up=given_up.is_set)
    return await finish(finding, hurry=given_up.set)


@asynccontextmanager
async def build_pools(cfg: Config, rollouts: RolloutPool | None = None) -> AsyncIterator[Pools]:
    """Starts all workers concurrently, and stops them at the end. rollouts: engines that are already up and stay up;
    the first weight sync gives them the actors' weights."""
    half = cfg.trainer.only
    if half == "rollout" and rollouts is not None:
        raise ValueError("`trainer.only` is rollout, and these engines may hold what another run has trained; use both")
    device = device_of(cfg)
    placement = await place(cfg, device)

    async def rest() -> None:  # new ranks need the GPUs that engines use in their turn
        await sync.rest()

    def gpus_of_engine(number: int) -> list[str]:
        return actors.gpus(placement.ranks_of_engine(number))

    engines = create_rollouts(cfg, placement) if rollouts is None else rollouts
    rewards = create_rewards(cfg, placement, device)
    functions = create_functions(cfg, placement) if half != "train" else None
    leave_gpus = rest if shares_gpus(cfg) else None
    actors: FixedPolicy | ActorPool = FixedPolicy()
    sync: NoSync | WeightSync = NoSync(engines)
    if half != "rollout":
        actors = ActorPool(cfg, device, placement.actors, leave_gpus)
        if half == "both":
            sync = WeightSync(actors, engines, cfg)

    async def start_engines() -> None:
        if rollouts is None and half != "train":
            await engines.start(cfg.model.path, engine_args(cfg, device), gpus_of_engine)

    async def start_rewards() -> None:
        if half != "train":
            say(await rewards.start(cfg.rollout.start_timeout_s))

    async def start_others() -> None:
        await asyncio.gather(start_rewards(), start_functions(cfg, functions), actors.start())

    async def join() -> None:
        if engines.may_join:
            options, own = await asyncio.to_thread(placement.another)
            own(engines.join(options))

    async def leave(number: int, seconds: float) -> None:  # at staleness 0 the same tokens have to come
        await engines.leave(number, seconds, hand_over=cfg.filter_groups.max_staleness > 0)

    told, over, own_node = asyncio.Event(), threading.Event(), ray.get_runtime_context().get_node_id()

    def on_going(node: str) -> None:
        if node == own_node:
            warn("the driver's node goes: the run saves and ends")
            signal.raise_signal(signal.SIGTERM)
        elif isinstance(actors, ActorPool) and node in actors.nodes():
            warn("a node with actor ranks goes: the run saves")
            told.set()

    try:
        if shares_gpus(cfg):  # an engine measures free memory, so actors must not load meanwhile
            await actors.find()
            await start_engines()
            await engines.sleep()
            await start_others()
        else:
            await asyncio.gather(start_engines(), start_others())
        scales = rollouts is None and half != "train" and (lends(cfg) or not shares_gpus(cfg))
        scaling = Scaling(
            lambda: engines.engines if scales else {},
            join,
            leave,
            warn,
            wanted=max(cfg.rollout.num_engines, cfg.rollout.max_engines) if scales else 0,
            leave_s=cfg.rollout.leave_s,
            going=going_nodes(cfg.rollout.leave_s, over),
            on_going=on_going,
        )
        lender = Lender(engines.slots, sync.lend, sync.rest) if lends(cfg) else None
        yield Pools(
            rollouts=in_turns(cfg, engines, functions),
            rewards=rewards,
            actors=actors,
            sync_weights=sync,
            weights=sync.lock,
            compare=sync.compare if isinstance(sync, WeightSync) else None,
            leave_gpus=leave_gpus if lender is None else lender.leave,
            lender=lender,
            scale=scaling.follow,
            told=told,
            gpus=count_gpus(cfg, device),
        )
    finally:
        over.set()
        placement.give_up()  # else a thread that waits for a place would delay the end
        actors.close()
        rewards.stop()
        stop_functions(functions)
        if rollouts is None:
            await engines.stop(STOP_GRACE_S)


def create_rollouts(cfg: Config, placement: Placement) -> RolloutPool:
    """Creates the engines' actors; `start` loads their model."""
    options, lent = placement.rollout(), lent_engines(cfg)
    return RolloutPool(
        options,
        cfg.rollout,
        warn=warn,
        release=placement.release_engine,
        lent=lent,
        outside=placement.outside(),
        lags=cfg.filter_groups.max_staleness,
    )


def create_functions(cfg: Config, placement: Placement) -> TurnFleet | None:
    function, limits, given = cfg.rollout.function, cfg.reward.limits, cfg.data.chat_template_kwargs
    if not function.path:
        return None
    return TurnFleet(placement.rewards(), function, limits=limits, template_kwargs=given, warn=warn)


async def start_functions(cfg: Config, functions: TurnFleet | None) -> None:
    if functions is not None:
        model, limit_s = cfg.model, cfg.rollout.start_timeout_s
        if confined := await functions.start(model.path, model.trust_remote_code, limit_s):
            say(f"rollout function: programs of the model: {confined}")


def stop_functions(functions: TurnFleet | None) -> None:
    if functions is not None:
        functions.stop()


def in_turns(cfg: Config, engines: RolloutPool, functions: TurnFleet | None) -> Rollouts:
    """Returns the source of responses: the engines alone, or the rollout function with them."""
    if functions is None:
        return engines
    return TrajectoryPool(engines, functions, retries=cfg.rollout.function.retries, warn=warn)


def create_rewards(cfg: Config, placement: Placement, device: str) -> RewardPool:
    """Creates the reward workers, the reward model and the run's own judges; `start` loads them."""
    model = None
    if cfg.reward.model.path:
        where = reward_model_device(cfg, device)
        model = RewardModelPool(cfg.reward.model, placement.reward_model(), device=where, warn=warn)
    judges = None
    if cfg.reward.judge.engine.path:
        judges = JudgePool(cfg.reward.judge.engine, placement.judges(), device=judge_device(cfg, device), warn=warn)
    return RewardPool(
        placement.rewards(),
        cfg.reward,
        max_response_length=cfg.data.max_response_length,
        sources=cfg.data.sources,
        model=model,
        judges=judges,
        warn=warn,
    )
