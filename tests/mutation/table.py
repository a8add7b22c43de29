"""Lines on which a promise depends, each with a wrong version and the tests that have to notice."""

from tests.mutation.mutation import Mutation
from tests.mutation.routing import ROUTING

CHAIN = ("tests/unit/events",)
WRITER = ("tests/unit/events/test_writer.py", "tests/contract/log")
DECISION = ("tests/unit/router/decision",)
SAGA = ("tests/unit/actors/edge/request",)
LEASE = ("tests/unit/actors/runtime",)
WORKER = ("tests/unit/actors/worker",)

MUTATIONS = (
    *ROUTING,
    Mutation(
        "events/chain.py",
        "if batch.seq <= head.seq:",
        "if batch.seq < head.seq:",
        "a duplicate is folded again",
        CHAIN,
    ),
    Mutation(
        "events/chain.py",
        "elif batch.epoch < head.epoch:",
        "elif batch.epoch < 0:",
        "an old incarnation's message is folded",
        CHAIN,
    ),
    Mutation(
        "events/chain.py",
        "elif batch.seq != 1 or batch.previous != head.digest:",
        "elif batch.seq != 1:",
        "a lost last message of an incarnation goes unnoticed",
        CHAIN,
    ),
    Mutation(
        "events/writer.py",
        "self._previous = message.digest",
        "pass",
        "messages are not chained",
        WRITER,
    ),
    Mutation(
        "events/writer.py",
        "if len(self._pending) >= PENDING_EVENTS_MAX:",
        "if False:",
        "the writer's queue has no bound",
        WRITER,
    ),
    Mutation(
        "events/writer.py",
        "case Fenced(epoch=epoch):\n                raise WriterFenced(",
        "case Fenced(epoch=epoch):\n                result = Unknown(",
        "a fenced writer tries again",
        WRITER,
    ),
    Mutation(
        "engines/sim/scheduler.py",
        "            self._cache_full_blocks(sequence, sequence.computed + count)\n            self.running.append(sequence)",
        "            self.running.append(sequence)",
        "prompts that start in one step compute the same blocks",
        ("tests/unit/engines/sim",),
    ),
    Mutation(
        "actors/worker/serving/prefill_timer.py",
        "left.accepted_s <= step_s and",
        "left.accepted_s <= began_s and",
        "a prompt that shared the last step makes a sample of its own",
        ("tests/unit/actors/worker/serving/test_prefill_timer.py",),
    ),
    Mutation(
        "schemas/events/route.py",
        "max(0, self.output_tokens - 1) * candidate.itl_ms",
        "self.output_tokens * candidate.itl_ms",
        "the first token counts twice in E2E",
        DECISION,
    ),
    Mutation(
        "actors/edge/request/saga.py",
        "skip = saga.emitted - attempt.first - entry.position",
        "skip = 0",
        "tokens are repeated",
        SAGA,
    ),
    Mutation(
        "actors/edge/request/saga.py",
        "    if skip < 0:\n",
        "    if False:\n",
        "a lost frame goes unnoticed",
        SAGA,
    ),
    Mutation(
        "actors/edge/request/saga.py",
        "    if saga.received < event.position:\n        return saga\n",
        "",
        "an answer ends before its last tokens",
        SAGA,
    ),
    Mutation(
        "actors/edge/request/saga.py",
        'case StopMatched() if saga.state == "decode":\n            _cancel(saga.attempt, effects)',
        'case StopMatched() if saga.state == "decode":',
        "a request runs on after its stop string",
        SAGA,
    ),
    Mutation(
        "actors/edge/request/migration.py",
        "return not emitted or not _engine_state(sampling)",
        "return True",
        "a grammar starts anew in the middle of an answer",
        SAGA,
    ),
    Mutation(
        "actors/runtime/lease.py",
        "return held is not None and (held.epoch, held.incarnation) == (self.epoch, self._lease.incarnation)",
        "return held is not None",
        "a lease of another incarnation passes for the own one",
        LEASE,
    ),
    Mutation(
        "actors/runtime/lease.py",
        "revision = await self._table.create(self._key, self._value, ttl_s=TTL_S)\n            if revision is not None:",
        "revision = None\n            if revision is not None:",
        "a lapsed lease ends the incarnation",
        LEASE,
    ),
    Mutation(
        "actors/worker/serving/requests.py",
        "if self.frames.has_stream(request.request):",
        "if False:",
        "a request that is sent again runs twice",
        WORKER,
    ),
    Mutation(
        "actors/worker/serving/handoffs.py",
        "one.stage = _Stage.GRANTED",
        "pass",
        "the same KV is granted twice",
        WORKER,
    ),
    Mutation(
        "actors/worker/serving/handoffs.py",
        "if one.stage is _Stage.OFFERED and one.edge == edge]",
        "if one.stage is _Stage.OFFERED]",
        "the death of one edge costs the others their KV",
        WORKER,
    ),
    Mutation(
        "actors/worker/serving/orphans.py",
        "if released := self._kept.release_kept_kv(edge):",
        "if released := 0:",
        "KV stays pinned for an edge that is gone",
        WORKER,
    ),
    Mutation(
        "schemas/hashing.py",
        'text = len(lora).to_bytes(4, "little") + lora + salt',
        "text = lora",
        "tenants share cache blocks",
        ("tests/unit/schemas",),
    ),
    Mutation(
        "actors/edge/model/stop_strings.py",
        "keep = max(_overlap(held, stop) for stop in self._stops)",
        "keep = 0",
        "a stop string in two pieces is missed",
        ("tests/unit/actors/edge/model",),
    ),
    Mutation(
        "actors/media/sources/url.py",
        "if not all(allowed):",
        "if not any(allowed):",
        "media are fetched from a private address of a host that has a public one too",
        ("tests/unit/actors/media/test_attacks_by_url.py",),
    ),
    Mutation(
        "actors/media/process.py",
        "fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS",
        "False",
        "a decoder that was taken over can change pixels after they were named",
        ("tests/unit/actors/media/test_processes.py",),
    ),
    Mutation(
        "actors/edge/generation/messages/load.py",
        "if tokens != item.shape[0]:",
        "if tokens < 0:",
        "an embedding with another number of tokens reaches an engine",
        ("tests/unit/actors/edge/generation",),
    ),
    Mutation(
        "ops/nats/watch.py",
        "if frozen == {} or (frozen is None and not reported):",
        "if not frozen:",
        "a store whose health check blocks is never restarted",
        ("tests/unit/ops/nats",),
    ),
    Mutation(
        "actors/edge/request/saga_types.py",
        "if incarnation in self.died_with:",
        "if False:",
        "a request is given up for one worker's death that it met twice",
        ("tests/unit/actors/edge/request/test_deaths.py",),
    ),
    Mutation(
        "ops/worker/default_model.py",
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        "pass",
        "each process that needs the default model at once converts it",
        ("tests/unit/ops/worker/test_default_model.py",),
    ),
    Mutation(
        "engines/sglang/embeddings/input.py",
        "if self.encoded != encoded:",
        "if False:",
        "an engine that ignores embeddings becomes a reader of encode workers",
        ("tests/unit/engines/embeddings/test_probe.py",),
    ),
)
