/** Rates and latencies over time, of all requests or some, split by tenant or model, with the log's events as marks; and usage. */
import { html, useSignal } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { Chart, MarkTable } from '../charts.js';
import { goToTime } from '../moving.js';
import { Badge, Empty, Link, Notice, Panel, Select, View, WindowSelect, windowLabel } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const CHARTS = [
  { title: 'Time to first token', unit: 'ms', unitLabel: 'milliseconds', names: [['ttft_p50_ms', 'p50'], ['ttft_p90_ms', 'p90'], ['ttft_p99_ms', 'p99']] },
  { title: 'Duration of requests', unit: 'ms', unitLabel: 'milliseconds', names: [['duration_p50_ms', 'p50'], ['duration_p99_ms', 'p99']] },
  { title: 'Requests', unit: '1/s', unitLabel: 'requests per second', names: [['requests_per_s', 'accepted']] },
  { title: 'Output', unit: '1/s', unitLabel: 'tokens per second', names: [['tokens_per_s', 'tokens']] },
  { title: 'Errors and migrations', unit: '1/s', unitLabel: 'requests per second', names: [['errors_per_s', 'failed'], ['migrations_per_s', 'migrated']] },
  { title: 'Waited in the router’s queue', unit: 'ms', unitLabel: 'milliseconds', names: [['queue_p99_ms', 'p99']] },
  { title: 'Cache hits', unit: 'share', unitLabel: 'share of prompt tokens', names: [['hit_rate', 'found by engines'], ['predicted_hit_rate', 'predicted by the router']] },
  { title: 'Found minus expected', unit: 'ms', unitLabel: 'time to first token, milliseconds, median', names: [['regret_ms', 'difference']], signed: true },
  { title: 'Requests in engines', unit: '', unitLabel: 'requests', names: [['running', 'running'], ['waiting', 'waiting']] },
  { title: 'KV cache in use', unit: 'share', unitLabel: 'share of blocks', names: [['kv_used', 'in use']] },
];

/** What a chart of a split shows: one measure, a line for each group. */
const MEASURES = [
  { title: 'Time to first token, p50', unit: 'ms', unitLabel: 'milliseconds', name: 'ttft_p50_ms' },
  { title: 'Time to first token, p99', unit: 'ms', unitLabel: 'milliseconds', name: 'ttft_p99_ms' },
  { title: 'Duration of requests, p50', unit: 'ms', unitLabel: 'milliseconds', name: 'duration_p50_ms' },
  { title: 'Requests', unit: '1/s', unitLabel: 'accepted per second', name: 'requests_per_s' },
  { title: 'Output', unit: '1/s', unitLabel: 'tokens per second', name: 'tokens_per_s' },
  { title: 'Errors', unit: '1/s', unitLabel: 'requests per second', name: 'errors_per_s' },
  { title: 'Waited in the router’s queue, p99', unit: 'ms', unitLabel: 'milliseconds', name: 'queue_p99_ms' },
  { title: 'Cache hits', unit: 'share', unitLabel: 'share of prompt tokens', name: 'hit_rate' },
];

/** In filters, requests without a tenant. */
const NO_TENANT = 'none';

const tenantLabel = (name) => (name ? format.shortened(name, 18) : 'without a tenant');

function Filters({ data, values }) {
  const splits = [{ value: '', label: 'all together' }, { value: 'model', label: 'by model' }, ...(state.allowed('tenants') ? [{ value: 'tenant', label: 'by tenant' }] : [])];
  const select = (label, name, listed, text) => {
    const known = listed.some((one) => one.value === values[name]) || !values[name] ? listed : [...listed, { value: values[name], label: text(values[name]) }];
    return html`<${Select} label=${label} value=${values[name] || ''} options=${[{ value: '', label: 'Any' }, ...known]} onChange=${(chosen) => state.adjust({ [name]: chosen })} />`;
  };
  const models = (data?.models || []).map((one) => ({ value: one.name, label: `${format.shortened(one.name, 32)} (${format.integer(one.requests)})` }));
  const tenants = (data?.tenants || []).map((one) => ({ value: one.tenant || NO_TENANT, label: `${tenantLabel(one.tenant)} (${format.integer(one.requests)})` }));
  return html`<div class="filters" role="search" aria-label="Filter rates">
    <${Select} label="Show" value=${values.split || ''} options=${splits} onChange=${(split) => state.adjust({ split })} />
    ${select('Model', 'model', models, (name) => format.shortened(name, 32))}
    ${state.allowed('tenants') ? select('Tenant', 'tenant', tenants, tenantLabel) : null}
  </div>`;
}

function AllTogether({ data, filtered }) {
  // What engines run is known of all requests only.
  const charts = filtered ? CHARTS.filter((one) => one.names.every(([name]) => data.series[name])) : CHARTS;
  return charts.map((one) => html`<${Chart} key=${one.title} title=${one.title} unit=${one.unit} unitLabel=${one.unitLabel} signed=${one.signed} answer=${data} marks=${data.marks} onTime=${goToTime}
    series=${one.names.map(([name, label]) => ({ name, label }))} lists=${one.names.map(([name]) => data.series[name] || data.series.requests_per_s.map(() => null))} />`);
}

function Groups({ data }) {
  const label = (group) => (data.split === 'tenant' ? tenantLabel(group.tenant) : format.shortened(group.model, 24));
  return MEASURES.map((one) => html`<${Chart} key=${one.title} title=${one.title} unit=${one.unit} unitLabel=${one.unitLabel} answer=${data} marks=${data.marks} onTime=${goToTime}
    series=${data.groups.map((group) => ({ name: group[data.split], label: label(group) }))} lists=${data.groups.map((group) => group.series[one.name])} />`);
}

function usageColumns(first) {
  const link = (row) => html`<${Link} view="requests" values=${{ [first]: row[first] || (first === 'tenant' ? NO_TENANT : '') }}>${first === 'tenant' ? tenantLabel(row.tenant) : format.shortened(row.model, 32)}<//>`;
  const tokens = (name, label) => ({ name, label, unit: 'tokens', align: 'right', render: (row) => format.integer(row[name]) });
  return [
    { name: first, label: first === 'tenant' ? 'Tenant' : 'Model', className: 'clip', render: link },
    { name: 'accepted', label: 'Accepted', align: 'right', render: (row) => format.integer(row.accepted) },
    { name: 'ended', label: 'Ended', align: 'right', wide: true, render: (row) => format.integer(row.ended) },
    { name: 'failed', label: 'Failed', align: 'right', render: (row) => (row.failed ? html`<${Badge} kind="critical">${format.integer(row.failed)}<//>` : '0') },
    { name: 'open', label: 'Open', align: 'right', wide: true, render: (row) => format.integer(row.open) },
    tokens('prompt_tokens', 'In'),
    { ...tokens('cached_tokens', 'Cached'), wide: true },
    tokens('completion_tokens', 'Out'),
  ];
}

function Usage({ answer }) {
  if (answer.error) return html`<p class="notice">${answer.error.message}</p>`;
  const { data } = answer;
  if (!data) return html`<div class="skeleton"></div>`;
  const empty = html`<${Empty} title="No request in this window." />`;
  return html`<${Notice} text=${data.notice} />
    ${state.allowed('tenants') ? html`<${Table} label="Usage by tenant" columns=${usageColumns('tenant')} rows=${data.by_tenant} keyOf=${(row) => row.tenant} empty=${empty} />` : html`<p class="muted">Tenants are shown to who has the scope <code>admin</code>.</p>`}
    <${Table} label="Usage by model" columns=${usageColumns('model')} rows=${data.by_model} keyOf=${(row) => row.model} empty=${empty} />`;
}

/** The view. */
export function Rates() {
  const seconds = useSignal(state.windowSeconds);
  const values = useSignal(state.parameters);
  const { split, model, tenant } = values;
  const answer = useAnswerHere('series', { window_s: seconds, columns: 120, split, model, tenant });
  const usage = useAnswerHere('usage', { window_s: seconds });
  const data = answer.data;
  const subtitle = data && `${format.time(data.from_ms)} to ${format.time(data.to_ms)}; a point stands for ${format.duration(data.step_ms)}`;
  const rest = data ? data.groups_total - data.groups.length : 0;
  return html`<${View} title="Rates and latencies" subtitle=${subtitle} actions=${html`<${WindowSelect} />`} controls=${html`<${Filters} data=${data} values=${values} />`} answer=${answer}>
    ${data && html`<p class="muted hint">Hatched time has no data. Click in a chart to go to that time, or move over it with the arrow keys and press Enter.${rest > 0 ? ` The ${data.groups.length} with most requests of ${data.groups_total}.` : ''}</p>
    <div class="charts" key=${data.split}>
      ${data.split ? html`<${Groups} data=${data} />` : html`<${AllTogether} data=${data} filtered=${model || tenant} />`}
    </div>
    <${Panel} title="Usage" note=${`tokens of requests that ended in ${windowLabel(seconds)}`}><${Usage} answer=${usage} /><//>
    <${Panel} title="Log events in this window" note=${windowLabel(seconds)}>
      <${MarkTable} marks=${data.marks} />
    <//>`}
  <//>`;
}
