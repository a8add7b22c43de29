"""Lines on which a promise depends, each with a wrong version and the tests that have to notice."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file`, `before` (which occurs once) becomes `after`; `tests` are run and one must fail."""

    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]


CHAIN = ("tests/unit/events",)
WRITER = ("tests/unit/events/test_writer.py", "tests/contract/log")
FOLD = ("tests/unit/router/fold",)
DECISION = ("tests/unit/router/decision",)
QUEUE = ("tests/unit/router/queue", "tests/unit/actors/router")
SAGA = ("tests/unit/actors/edge/request",)
LEASE = ("tests/unit/actors/runtime",)
WORKER = ("tests/unit/actors/worker",)
INDEX = ("tests/unit/router/index",)

MUTATIONS = (
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
        "router/fold/state.py",
        "if known is None or known.epoch < event.epoch:",
        "if known is None:",
        "a new incarnation keeps its predecessor's blocks",
        FOLD,
    ),
    Mutation(
        "router/fold/state.py",
        "return worker is not None and worker.epoch == batch.epoch",
        "return worker is not None",
        "KV events of another epoch enter the index",
        FOLD,
    ),
    Mutation(
        "router/fold/state.py",
        "self.index.clear(batch.writer)",
        "pass",
        "a cleared cache stays in the index",
        FOLD,
    ),
    Mutation(
        "router/decision/filters.py",
        "and worker.pairs_with == wanted.pairs_with",
        "",
        "KV goes to a worker that cannot read it",
        DECISION,
    ),
    Mutation(
        "router/decision/filters.py",
        "lambda worker, wanted: worker.takes_requests,",
        "lambda worker, wanted: True,",
        "a draining worker gets requests",
        (*DECISION, "tests/unit/router"),
    ),
    Mutation(
        "router/decision/candidates.py",
        "allowed[excluded] = 0",
        "allowed[excluded] = 1",
        "a request returns to the worker that failed it",
        DECISION,
    ),
    Mutation(
        "router/decision/cost.py",
        "cached = max(gpu, min(credited[row], usable))",
        "cached = 0",
        "cached blocks do not count",
        DECISION,
    ),
    Mutation(
        "router/decision/cost.py",
        "return own * (retain + crowding * requests) + later",
        "return own * retain + later",
        "running requests do not count",
        DECISION,
    ),
    Mutation(
        "router/decision/cost.py",
        "return weights.queued * work.queued_prompts * work.times.block * blocks",
        "return 0.0 * blocks",
        "queued prompts are not delayed",
        DECISION,
    ),
    Mutation(
        "engines/sim/scheduler.py",
        "            self._cache_full_blocks(sequence, sequence.computed + count)\n            self.running.append(sequence)",
        "            self.running.append(sequence)",
        "prompts that start in one step compute the same blocks",
        ("tests/unit/engines/sim",),
    ),
    Mutation(
        "router/decision/cost.py",
        "later = arrivals / 1000.0 * (2.0 * queue + own) * own / 2.0",
        "later = 0.0",
        "requests that come later do not count",
        DECISION,
    ),
    Mutation(
        "router/fold/prefill_time.py",
        "self.counts[at] = max(TRUST, self.counts[at] // 2)",
        "pass",
        "a wrong first sample of prefill times is kept",
        ("tests/unit/router/fold/test_prefill_time.py",),
    ),
    Mutation(
        "router/queue/burst_order.py",
        "key=lambda index: _prompt_ms(replies[index])",
        "key=lambda index: 0",
        "a burst is answered in the order of its decisions",
        ("tests/unit/router/queue/test_burst_order.py",),
    ),
    Mutation(
        "actors/worker/serving/prefill_timer.py",
        "left.accepted_s <= step_s and",
        "left.accepted_s <= began_s and",
        "a prompt that shared the last step makes a sample of its own",
        ("tests/unit/actors/worker/serving/test_prefill_timer.py",),
    ),
    Mutation(
        "router/decision/prefill_times.py",
        "began_ms = done_ms = max(began_ms, -ASSUMED * age_ms - took_ms)",
        "pass",
        "a prompt that is late is taken for computed",
        DECISION,
    ),
    Mutation(
        "router/decision/prefill_times.py",
        "own = pace * predict_ms(lengths, times, classes, uncached)",
        "own = predict_ms(lengths, times, classes, uncached)",
        "a slow worker is estimated like the others",
        DECISION,
    ),
    Mutation(
        "router/decision/cost.py",
        "min(used_blocks + new_blocks(work), work.total_blocks)",
        "used_blocks",
        "the prompt's own blocks do not slow decoding",
        DECISION,
    ),
    Mutation(
        "router/fold/load.py",
        "worker.decode_model.observe(step_ms, max(1, worker.running), blocks, event.gaps)",
        "worker.decode_model.observe(step_ms, max(1, event.running), blocks, event.gaps)",
        "step times are learned for the requests that came after them",
        DECISION,
    ),
    Mutation(
        "router/fold/decode_time.py",
        "weight = min(float(tokens), SHARE_MAX * MEMORY_TOKENS)",
        "weight = 1.0",
        "a report of one token counts as one of a hundred",
        FOLD,
    ),
    Mutation(
        "router/fold/output_length.py",
        "weight = one.count / (one.count + PRIOR)",
        "weight = 1.0",
        "the first answer of a tenant is expected again",
        FOLD,
    ),
    Mutation(
        "schemas/events/route.py",
        "max(0, self.output_tokens - 1) * candidate.itl_ms",
        "self.output_tokens * candidate.itl_ms",
        "the first token counts twice in E2E",
        DECISION,
    ),
    Mutation(
        "router/queue/admission_queue.py",
        "if query.flow.waits and self.waiting.has_key(query.constraints):",
        "if False:",
        "a query overtakes equal ones in the queue",
        QUEUE,
    ),
    Mutation(
        "router/queue/admission_queue.py",
        "if not deadline_ms or waited_s + serve_s <= deadline_ms / 1_000.0:",
        "if not deadline_ms or serve_s <= deadline_ms / 1_000.0:",
        "time in the queue does not count against the deadline",
        QUEUE,
    ),
    Mutation(
        "router/queue/admission_queue.py",
        "return now.monotonic_s - self._fold_advanced_s > SILENCE_S",
        "return False",
        "without a log all queries stay queued",
        QUEUE,
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
        "router/index/hash_table.py",
        "if from_home >= from_hole:",
        "if from_home > from_hole:",
        "a removal hides another block",
        INDEX,
    ),
    Mutation(
        "router/index/match.py",
        "_note_depth(gpu & ~on_gpu, 2 * words + word * 64, start + j, state)",
        "_note_depth(gpu & ~on_gpu, 2 * words + word * 64, start + j + 1, state)",
        "an overlap is one block too long",
        INDEX,
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
        "router/decision/prefill_times.py",
        "return pulled.queue + arrival + pulled.prefill < computed.queue + computed.prefill",
        "return pulled.prefill < computed.prefill",
        "a prefix is pulled that would be computed sooner",
        DECISION,
    ),
    Mutation(
        "router/decision/cost.py",
        "            if blocks > held[at]:",
        "            if blocks >= held[at]:",
        "another source than the first one with most of the prompt is named",
        DECISION,
    ),
    Mutation(
        "router/fold/load.py",
        "cached = (decision.chosen.cached_blocks + decision.chosen.pull_blocks) * worker.block_size",
        "cached = decision.chosen.cached_blocks * worker.block_size",
        "pulled blocks count as work of their target",
        DECISION,
    ),
    Mutation(
        "router/fold/prefill_time.py",
        "if abs(outliers) > OUTLIERS_MAX:\n        clamp",
        "if abs(outliers) > 1_000:\n        clamp",
        "a worker that turns slow is known after hundreds of prompts",
        FOLD,
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
        "router/fold/worker.py",
        'return f"{engine} encoder" if role == "encode" else engine',
        "return engine",
        "images teach what prompts take",
        FOLD,
    ),
    Mutation(
        "router/fold/encode_time.py",
        "if kind in self.kinds:",
        "if False:",
        "one stall decides where images are encoded",
        FOLD,
    ),
)
