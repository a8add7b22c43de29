/** Requests that wait at the router, and prompts that are handed from worker to worker. */
import { html, useSignal } from '../library.js';
import { useAnswer } from '../answers.js';
import { Empty, Meter, Panel, RequestLink, SmallTable, StateBadge, Tile, Time, View, WindowSelect, WorkerLink, windowLabel } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const code = (text) => html`<span class="code">${text || format.UNKNOWN}</span>`;

const WAITING = [
  { name: 'request', label: 'Request', render: (one) => html`<${RequestLink} id=${one.request} />` },
  { name: 'waited', label: 'Waits for', align: 'right', render: (one) => format.duration(one.waited_ms) },
  { name: 'priority', label: 'Priority', align: 'right', render: (one) => format.integer(one.priority) },
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
  { name: 'expected', label: 'Expected', align: 'right', render: (one) => format.duration(one.transfer_ms_expected) },
  { name: 'tokens', label: 'Prompt', unit: 'tokens', align: 'right', render: (one) => format.integer(one.tokens) },
  { name: 'text', label: 'Remark', wide: true, render: (one) => one.text || format.UNKNOWN },
];

function Tenants({ rows }) {
  if (!rows.length) return html`<p class="muted">No tenant waits.</p>`;
  const most = Math.max(1, ...rows.map((row) => row.count));
  return html`<${SmallTable} label="Waiting requests by tenant" headings=${[['Tenant'], ['Requests'], ['Oldest waits for', true]]}>
    ${rows.map((row) => html`<tr key=${row.tenant}>
      <td class="clip">${row.tenant ? code(row.tenant) : 'without one'}</td>
      <td><${Meter} value=${row.count} maximum=${most} text=${format.integer(row.count)} label="Requests" plain=${true} /></td>
      <td class="right number">${format.duration(row.oldest_ms)}</td>
    </tr>`)}
  <//>`;
}

function QueuePart({ data }) {
  return html`
    <dl class="tiles tiles-few">
      <${Tile} label="Requests that wait" value=${format.integer(data.waiting.length)} kind=${data.waiting.length ? 'warning' : ''} />
      <${Tile} label="Waited, p50" value=${format.duration(data.waited.p50_ms)} detail="decisions of the last 5 minutes" />
      <${Tile} label="Waited, p99" value=${format.duration(data.waited.p99_ms)} detail="decisions of the last 5 minutes" />
    </dl>
    <div class="columns columns-wide">
      <${Panel} title="Waiting at the router"><${Table} label="Requests that wait" columns=${WAITING} rows=${data.waiting} keyOf=${(one) => one.request}
        empty=${html`<${Empty} title="No request waits at this position.">A request waits while all its workers are saturated.<//>`} /><//>
      <${Panel} title="By tenant"><${Tenants} rows=${data.by_tenant} /><//>
    </div>`;
}

/** The view. */
export function Queue() {
  const position = useSignal(state.position);
  const seconds = useSignal(state.windowSeconds);
  const queue = useAnswer('queue', position === null ? null : { at: position });
  const handoffs = useAnswer('handoffs', position === null ? null : { at: position, window_s: seconds });
  return html`<${View} title="Queue and hand-offs" actions=${html`<${WindowSelect} />`} answer=${queue} answers=${[handoffs]}>
    ${queue.data && html`<${QueuePart} data=${queue.data} />`}
    <${Panel} title="Hand-offs" note=${`of the ${windowLabel(seconds)} before the position`}>
      ${handoffs.data ? html`<${Table} label="Hand-offs" columns=${HANDOFFS} rows=${handoffs.data.handoffs} keyOf=${(one) => one.id} onOpen=${(one) => state.show('request', { id: one.request })}
        empty=${html`<${Empty} title="No hand-off in this window.">Only a pool with prefill and decode workers hands prompts over. Choose a longer window if there should be some.<//>`} />` : html`<div class="skeleton"></div>`}
    <//>
  <//>`;
}
