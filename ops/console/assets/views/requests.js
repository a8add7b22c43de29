/** Requests of the window before the position, with filters; a row opens the request. */
import { html, useEffect, useSignal, useState } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { Badge, Empty, RequestLink, Select, StateBadge, TextField, Time, View, WindowSelect, WorkerLink, windowLabel } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

/** Rows asked for at once; more than any screen shows. */
const PAGE = 200;

const STATES = [
  { value: 'all', label: 'All' }, { value: 'open', label: 'Open' }, { value: 'ended', label: 'Ended' }, { value: 'failed', label: 'Failed' },
  { value: 'migrated', label: 'Migrated' }, { value: 'slow', label: 'Slow' },
];

function Workers({ names }) {
  return names.map((name, index) => html`<span key=${index}>${index ? ' → ' : ''}<${WorkerLink} name=${name} /></span>`);
}

function Outcome({ request }) {
  if (request.error) return html`<${Badge} kind="critical" title=${request.error}>failed<//>`;
  if (request.state !== 'ended') return html`<${StateBadge} state=${request.state} />`;
  return html`<${StateBadge} state=${request.reason || 'ended'} />`;
}

const COLUMNS = [
  { name: 'time', label: 'Accepted', sort: 'time', render: (one) => html`<${Time} value=${one.time_ms} precise=${true} />` },
  { name: 'id', label: 'Request', render: (one) => html`<${RequestLink} id=${one.id} />` },
  { name: 'state', label: 'State', render: (one) => html`<${Outcome} request=${one} />` },
  { name: 'ttft', label: 'First token', sort: 'ttft', align: 'right', title: 'Time to first token', render: (one) => format.duration(one.ttft_ms) },
  { name: 'duration', label: 'Duration', sort: 'duration', align: 'right', render: (one) => format.duration(one.duration_ms) },
  { name: 'waited', label: 'Waited', sort: 'waited', align: 'right', wide: true, title: 'Time in the router’s queue', render: (one) => format.duration(one.waited_ms) },
  { name: 'prompt', label: 'Prompt', unit: 'tokens', align: 'right', wide: true, render: (one) => format.integer(one.prompt_tokens) },
  { name: 'cached', label: 'Cached', unit: 'tokens', align: 'right', wide: true, render: (one) => format.integer(one.cached_tokens) },
  { name: 'output', label: 'Output', unit: 'tokens', sort: 'tokens', align: 'right', render: (one) => format.integer(one.completion_tokens) },
  { name: 'workers', label: 'Workers', className: 'clip', render: (one) => html`<${Workers} names=${one.workers} />` },
  { name: 'migrations', label: 'Migrations', align: 'right', wide: true, render: (one) => (one.migrations ? html`<${Badge} kind="warning">${format.integer(one.migrations)}<//>` : '0') },
  { name: 'endpoint', label: 'Endpoint', wide: true, className: 'clip', render: (one) => html`<span class="code">${one.endpoint}</span>` },
  { name: 'tenant', label: 'Tenant', wide: true, className: 'clip', render: (one) => html`<span class="code">${one.tenant || format.UNKNOWN}</span>` },
];

/** A choice among the names that occur, with how often. */
function FacetSelect({ label, name, value, facet }) {
  const names = Object.entries(facet || {}).sort((a, b) => b[1] - a[1]);
  if (value && !names.some(([one]) => one === value)) names.push([value, 0]);
  const options = [{ value: '', label: 'Any' }, ...names.map(([one, count]) => ({ value: one, label: `${format.shortened(one, 32)} (${count})` }))];
  return html`<${Select} label=${label} value=${value} options=${options} onChange=${(chosen) => state.adjust({ [name]: chosen })} />`;
}

function Filters({ values, facets }) {
  return html`<div class="filters" role="search" aria-label="Filter requests">
    <${TextField} label="Text" filter=${true} value=${values.text || ''} placeholder="request, model, error …" onChange=${(text) => state.adjust({ text }, 'replace')} />
    <${Select} label="State" value=${values.state || 'all'} options=${STATES} onChange=${(chosen) => state.adjust({ state: chosen === 'all' ? '' : chosen })} />
    <${FacetSelect} label="Model" name="model" value=${values.model || ''} facet=${facets?.models} />
    <${FacetSelect} label="Worker" name="worker" value=${values.worker || ''} facet=${facets?.workers} />
    ${values.tenant ? html`<span class="field">Tenant <span class="code">${format.shortened(values.tenant, 18)}</span> <button type="button" onClick=${() => state.adjust({ tenant: '' })}>Any tenant</button></span>` : null}
    <${FacetSelect} label="Endpoint" name="endpoint" value=${values.endpoint || ''} facet=${facets?.endpoints} />
  </div>`;
}

const FILTERS = ['text', 'state', 'model', 'worker', 'endpoint', 'tenant'];

function NoRequests({ filtered, seconds }) {
  if (filtered) {
    const clear = () => state.show('requests');
    return html`<${Empty} title="No request of the window matches the filters."><button type="button" onClick=${clear}>Clear the filters</button><//>`;
  }
  return html`<${Empty} title=${`No request was accepted in the ${windowLabel(seconds)} before this position.`}>Choose a longer window, or step to the previous request with the key R.<//>`;
}

/** The view. */
export function Requests() {
  const seconds = useSignal(state.windowSeconds);
  const values = useSignal(state.parameters);
  const [offset, setOffset] = useState(0);
  const filters = Object.fromEntries(FILTERS.map((name) => [name, values[name]]));
  const sort = values.sort || 'time';
  const order = values.order || 'desc';
  useEffect(() => setOffset(0), [JSON.stringify(filters), sort, order]);
  const question = { window_s: seconds, ...filters, sort, order, offset, limit: PAGE };
  const answer = useAnswerHere('requests', question);
  const ranged = (first, last) => {
    const data = answer.data;
    if (!data || (first >= data.offset && last <= data.offset + data.requests.length)) return;
    setOffset(Math.max(0, Math.floor((first - PAGE / 4) / 50) * 50));
  };
  const data = answer.data;
  const filtered = FILTERS.some((name) => filters[name]);
  return html`<${View} title="Requests" subtitle=${data && `${format.integer(data.total)} in the ${windowLabel(seconds)} before the position`} actions=${html`<${WindowSelect} />`} answer=${answer}
    controls=${html`<${Filters} values=${values} facets=${data?.facets} />`}>
    ${data && html`<${Table} label="Requests" columns=${COLUMNS} rows=${data.requests} offset=${data.offset} total=${data.total} keyOf=${(one) => one.id} sort=${{ by: sort, order }}
      onSort=${(by, next) => state.adjust({ sort: by, order: next }, 'replace')} onOpen=${(one) => state.show('request', { id: one.id })} onRange=${ranged}
      empty=${html`<${NoRequests} filtered=${filtered} seconds=${seconds} />`} />`}
  <//>`;
}
