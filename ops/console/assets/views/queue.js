/** Requests that wait at the router, and prompts that are handed from worker to worker. */
import { html, useSignal } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { Empty, Panel, RequestLink, StateBadge, Tile, Time, View, WindowSelect, WorkerLink, windowLabel } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const code = (text) => html`<span class="code">${text || format.UNKNOWN}</span>`;

const WAITING = [
  { name: 'request', label: 'Request', render: (one) => html`<${RequestLink} id=${one.request} />` },
  { name: 'waited', label: 'Waits for', align: 'right', render: (one) => format.duration(one.waited_ms) },
  { name: 'priority', label: 'Priority', align: 'right', render: (one) => format.integer(one.priority) },
  { name: 'before', label: 'Before it', title: 'Requests of lower priorities, which are served first', align: 'right', wide: true, render: (one) => format.integer(one.before) },
  { name: 'tenant', label: 'Tenant', className: 'clip', render: (one) => code(one.tenant) },
  { name: 'prompt', label: 'Prompt', unit: 'tokens', align: 'right', render: (one) => format.integer(one.prompt_tokens) },
  { name: 'model', label: 'Model', wide: true, render: (one) => one.model },
  { name: 'reason', label: 'Reason', className: 'wraps', render: (one) => one.reason },
];

const HANDOFFS = [
  { name: 'request', label: 'Request', render: (one) => html`<${RequestLink} id=${one.request} />` },
  { name: 'state', label: 'State', render: (one) => html`<${StateBadge} state=${one.state} />` },
  { name: 'from', label: 'From', className: 'clip', render: (one) => html`<${WorkerLink} name=${one.from} />` },
  { name: 'to', label: 'To', className: 'clip', render: (one) => html`<${WorkerLink} name=${one.to} />` },
  { name: 'prefilled', label: 'Prefilled', wide: true, render: (one) => html`<${Time} value=${one.prefilled_ms} precise=${true} />` },
  { name: 'started', label: 'Started', wide: true, render: (one) => html`<${Time} value=${one.started_ms} precise=${true} />` },
  { name: 'duration', label: 'Took', align: 'right', render: (one) => format.duration(one.duration_ms) },
  { name: 'tokens', label: 'Prompt', unit: 'tokens', align: 'right', render: (one) => format.integer(one.tokens) },
];

const GROUPS = [
  { name: 'priority', label: 'Priority', align: 'right', render: (one) => format.integer(one.priority) },
  { name: 'tenant', label: 'Tenant', className: 'clip', render: (one) => (one.tenant ? code(one.tenant) : 'without one') },
  { name: 'count', label: 'Waiting', align: 'right', render: (one) => format.integer(one.count) },
  { name: 'oldest', label: 'Oldest waits', align: 'right', render: (one) => format.duration(one.oldest_ms) },
  { name: 'routed', label: 'Routed', align: 'right', wide: true, render: (one) => format.integer(one.routed) },
  { name: 'p99', label: 'Waited, p99', align: 'right', wide: true, render: (one) => format.duration(one.p99_ms) },
];

function QueuePart({ data }) {
  const lately = `routed in the last ${windowLabel(data.waited_s)}`;
  const columns = data.by === 'priority' ? GROUPS.filter((one) => one.name !== 'tenant') : GROUPS;
  return html`
    <dl class="tiles tiles-few">
      <${Tile} label="Requests that wait" value=${format.integer(data.waiting.length)} kind=${data.waiting.length ? 'warning' : ''} />
      <${Tile} label="Waited, p50" value=${format.duration(data.waited.p50_ms)} detail=${lately} />
      <${Tile} label="Waited, p99" value=${format.duration(data.waited.p99_ms)} detail=${lately} />
    </dl>
    <${Panel} title="Waiting at the router" note="those to be served first on top"><${Table} label="Requests that wait" columns=${WAITING} rows=${data.waiting} keyOf=${(one) => one.request}
      empty=${html`<${Empty} title="No request waits at this position.">A request waits while all its workers are saturated.<//>`} />
      <p class="muted">${data.not_recorded}</p><//>
    <${Panel} title=${`By ${data.by}`} note=${`lower priorities are served first; ${lately}`}><${Table} label=${`Waiting requests by ${data.by}`} columns=${columns} rows=${data.groups} keyOf=${(one) => `${one.priority} ${one.tenant}`}
      empty=${html`<${Empty} title="No request waits or was routed lately." />`} /><//>`;
}

/** The view. */
export function Queue() {
  const seconds = useSignal(state.windowSeconds);
  const queue = useAnswerHere('queue', {});
  const handoffs = useAnswerHere('handoffs', { window_s: seconds });
  return html`<${View} title="Queue and hand-offs" actions=${html`<${WindowSelect} />`} answer=${queue} answers=${[handoffs]}>
    ${queue.data && html`<${QueuePart} data=${queue.data} />`}
    <${Panel} title="Hand-offs" note=${`of the ${windowLabel(seconds)} before the position`}>
      ${handoffs.data ? html`<${Table} label="Hand-offs" columns=${HANDOFFS} rows=${handoffs.data.handoffs} keyOf=${(one) => one.id} onOpen=${(one) => state.show('request', { id: one.request })}
        empty=${html`<${Empty} title="No hand-off in this window.">Only a pool with prefill and decode workers hands prompts over. Choose a longer window if there should be some.<//>`} />` : html`<div class="skeleton"></div>`}
    <//>
  <//>`;
}
