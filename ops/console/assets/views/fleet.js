/** The workers: their state at the position, and what they did before it. */
import { html, useMemo, useSignal, useState } from '../library.js';
import { setEngineWeights } from '../api.js';
import { useAnswerHere } from '../answers.js';
import { MarkTable } from '../charts.js';
import { fleet, refreshFleet, withRetry } from '../following.js';
import { Lanes } from '../lanes.js';
import { goToTime } from '../moving.js';
import { Badge, Dialog, Empty, Meter, Panel, Problem, StateBadge, TextField, Time, View, WindowSelect, WorkerLink } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const share = (worker) => (worker.total_blocks ? worker.used_blocks / worker.total_blocks : null);

const COLUMNS = [
  { name: 'name', label: 'Worker', sort: 'name', value: (worker) => worker.name, render: (worker) => html`<${WorkerLink} name=${worker.name} />` },
  { name: 'state', label: 'State', sort: 'state', value: (worker) => worker.state, render: (worker) => html`<${StateBadge} state=${worker.state} />` },
  { name: 'engine', label: 'Engine', wide: true, sort: 'engine', value: (worker) => worker.engine, render: (worker) => worker.engine },
  { name: 'revision', label: 'Revision', title: 'What the worker runs: its engine, its model and Headwater’s release', wide: true, sort: 'revision', value: (worker) => worker.revision, render: (worker) => worker.revision || format.UNKNOWN },
  { name: 'role', label: 'Role', wide: true, sort: 'role', value: (worker) => worker.role, render: (worker) => worker.role },
  { name: 'running', label: 'Running', sort: 'running', value: (worker) => worker.running, render: (worker) => html`<${Meter} value=${worker.running} maximum=${worker.max_running} text=${`${format.integer(worker.running)} / ${format.integer(worker.max_running)}`} label="running" />` },
  { name: 'waiting', label: 'Waiting', align: 'right', sort: 'waiting', value: (worker) => worker.waiting, render: (worker) => format.integer(worker.waiting) },
  { name: 'requests', label: 'In flight', title: 'Requests by the decisions of the log', align: 'right', wide: true, sort: 'requests', value: (worker) => worker.requests, render: (worker) => format.integer(worker.requests) },
  { name: 'queued', label: 'Queued', unit: 'tokens', title: 'Prompt tokens routed to the worker and not computed', align: 'right', sort: 'queued', value: (worker) => worker.queued_tokens, render: (worker) => format.integer(worker.queued_tokens) },
  { name: 'kv', label: 'KV in use', sort: 'kv', value: share, render: (worker) => html`<${Meter} value=${worker.used_blocks} maximum=${worker.total_blocks} text=${format.percent(share(worker))} label="KV cache in use" />` },
  { name: 'hits', label: 'Cache hits', align: 'right', wide: true, sort: 'hits', value: (worker) => worker.hit_rate, render: (worker) => format.percent(worker.hit_rate) },
  { name: 'step', label: 'Between tokens', align: 'right', wide: true, sort: 'step', value: (worker) => worker.step_ms, render: (worker) => format.duration(worker.step_ms) },
  { name: 'pace', label: 'Pace', title: 'Its prefill times divided by those of its engine’s model: above 1 is slower', align: 'right', wide: true, sort: 'pace', value: (worker) => worker.pace, render: (worker) => format.number(worker.pace) },
  { name: 'tier', label: 'Tier', wide: true, sort: 'tier', value: (worker) => worker.tier, render: (worker) => html`${worker.tier || format.UNKNOWN}${(worker.taints || []).map((taint) => html` <${Badge} key=${taint} kind="warning" title="Taint">${taint}<//>`)}` },
];

function sorted(workers, by, order) {
  const column = COLUMNS.find((one) => one.sort === by) || COLUMNS[0];
  const sign = order === 'desc' ? -1 : 1;
  const compare = (a, b) => {
    const [one, other] = [column.value(a), column.value(b)];
    if (one === other) return a.name.localeCompare(b.name, 'en', { numeric: true });
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return sign * (typeof one === 'number' ? one - other : String(one).localeCompare(String(other), 'en', { numeric: true }));
  };
  return [...workers].sort(compare);
}

function Left({ left }) {
  if (!left.length) return html`<p class="muted">No worker left in the last 30 minutes.</p>`;
  return html`<ul class="plain-list">${left.map((one) => html`<li key=${`${one.name} ${one.epoch} ${one.time_ms}`}><${Time} value=${one.time_ms} /> <strong>${one.name}</strong> <span class="muted">epoch ${one.epoch}</span> ${one.reason}</li>`)}</ul>`;
}

function LanePanel({ lanes, names }) {
  const answer = useMemo(() => lanes.data && { ...lanes.data, workers: lanes.data.workers.filter((worker) => names === null || names(worker.name)) }, [lanes.data, names]);
  if (lanes.error) return html`<${Problem} error=${lanes.error} retry=${lanes.retry} />`;
  if (!answer) return html`<div class="skeleton"></div>`;
  if (!answer.workers.length) return html`<${Empty} title="No worker of this name was in the fleet in this window." />`;
  const marks = answer.workers.flatMap((worker) => worker.marks.map((mark) => ({ worker: worker.name, ...mark })));
  const left = (lanes.data.total ?? 0) - lanes.data.workers.length;
  return html`${left > 0 && names === null ? html`<p class="muted">These are the ${lanes.data.workers.length} busiest of ${lanes.data.total} workers. Type a worker’s whole name in the filter to see its lane.</p>` : null}
    <${Lanes} answer=${answer} onTime=${goToTime} />
    <${MarkTable} marks=${marks} />`;
}

/** Asks for a weight of each engine, and sets or removes them. */
function WeightsDialog({ engines, weights, onClose }) {
  const [values, setValues] = useState(Object.fromEntries(engines.map((engine) => [engine, String(weights[engine] ?? (Object.keys(weights).length ? 0 : 1))])));
  const [problem, setProblem] = useState('');
  const send = async (chosen) => {
    try {
      state.message.value = `Engine weights: ${(await setEngineWeights(chosen)).detail}`;
      refreshFleet();
      onClose();
    } catch (error) {
      setProblem(error.message);
    }
  };
  const numbers = () => Object.fromEntries(Object.entries(values).map(([engine, text]) => [engine, Number(text)]));
  return html`<${Dialog} label="Engine weights" onClose=${onClose} className="confirmation">
    <h2>Engine weights</h2>
    <p>New requests go to the engines in these shares. They act now, whatever position is shown.</p>
    <div class="weights">${engines.map((engine) => html`<label key=${engine}><span>${engine}</span><input type="number" min="0" step="any" inputmode="decimal" value=${values[engine]} onInput=${(event) => setValues({ ...values, [engine]: event.currentTarget.value })} /></label>`)}</div>
    ${problem ? html`<p class="problem" role="alert">${problem}</p>` : null}
    <div class="actions"><button type="button" onClick=${onClose}>Cancel</button>${Object.keys(weights).length ? html`<button type="button" onClick=${() => send({})}>Remove</button>` : null}<button type="button" class="primary" onClick=${() => send(numbers())}>Set</button></div>
  <//>`;
}

/** The weights of a fleet with several engines, and for an operator a button that changes them. */
function EngineWeights({ workers, weights }) {
  const [asked, setAsked] = useState(false);
  const allowed = useSignal(state.site) && state.allowed('control');
  const engines = [...new Set([...workers.map((worker) => worker.engine), ...Object.keys(weights)])].sort();
  if (engines.length < 2 && !Object.keys(weights).length) return null;
  const total = Object.values(weights).reduce((sum, weight) => sum + weight, 0);
  const shown = total ? engines.map((engine) => `${engine} ${format.percent((weights[engine] ?? 0) / total)}`).join(', ') : 'none: requests go to the worker of least cost, whatever its engine';
  return html`<${Panel} title="Engine weights"><p>${shown}</p>
    ${allowed ? html`<div class="actions"><button type="button" onClick=${() => setAsked(true)}>Change</button></div>` : null}
    ${asked ? html`<${WeightsDialog} engines=${engines} weights=${weights} onClose=${() => setAsked(false)} />` : null}
  <//>`;
}

/** The shares of a pool's new requests by revision, and those that policies decide, where there is a split. */
function Splits({ splits }) {
  const lines = Object.entries(splits ?? {}).filter(([, shares]) => Object.keys(shares).length).map(([subject, shares]) => {
    const total = Object.values(shares).reduce((sum, share) => sum + share, 0);
    return html`<p key=${subject}>By ${subject}: ${Object.entries(shares).map(([name, share]) => `${name} ${format.percent(share / total)}`).join(', ')}</p>`;
  });
  return lines.length ? html`<${Panel} title="Traffic split">${lines}<//>` : null;
}

/** The view. */
export function Fleet() {
  const window = useSignal(state.windowSeconds);
  const { text = '', sort = 'name', order = 'asc' } = useSignal(state.parameters);
  const answer = withRetry(useSignal(fleet));
  // The server sends the lanes of the busiest workers, or that of the one that is named.
  const named = answer.data?.workers.some((worker) => worker.name === text) ? text : '';
  const lanes = useAnswerHere('lanes', { window_s: window, columns: 240, worker: named });
  const names = useMemo(() => (text ? (name) => name.toLowerCase().includes(text.toLowerCase()) : null), [text]);
  const workers = answer.data ? sorted(answer.data.workers.filter((worker) => !names || names(worker.name)), sort, order) : [];
  const actions = html`<${TextField} label="Filter" filter=${true} value=${text} placeholder="worker’s name" onChange=${(value) => state.adjust({ text: value }, 'replace')} /><${WindowSelect} />`;
  return html`<${View} title="Fleet" subtitle=${answer.data && `${format.integer(answer.data.totals.ready)} of ${format.integer(answer.data.totals.workers)} workers are ready`} actions=${actions} answer=${answer} answers=${[]}>
    ${answer.data && html`
      <${Panel} title="Workers">
        <${Table} label="Workers" columns=${COLUMNS} rows=${workers} keyOf=${(worker) => worker.name} sort=${{ by: sort, order }} onSort=${(by, next) => state.adjust({ sort: by, order: next }, 'replace')}
          onOpen=${(worker) => state.adjust({ panel: worker.name })} empty=${html`<${Empty} title="No worker at this position.">Change the filter, or move to a position at which workers are in the fleet.<//>`} />
      <//>
      <${EngineWeights} workers=${answer.data.workers} weights=${answer.data.engine_weights} />
      <${Splits} splits=${answer.data.splits} />
      <${Panel} title="Over time"><${LanePanel} lanes=${lanes} names=${names} /><//>
      <${Panel} title="Left" note="the last 30 minutes"><${Left} left=${answer.data.left} /><//>`}
  <//>`;
}
