/** The first screen: what is wrong, how much is going on, and the fleet at a glance. */
import { html, useSignal } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { Chart } from '../charts.js';
import { Findings } from '../findings.js';
import { fleet, withRetry } from '../following.js';
import { goToTime } from '../moving.js';
import { Empty, Link, Meter, Notice, Panel, StateBadge, Tile, View, WindowSelect, WorkerLink, windowLabel } from '../parts.js';
import * as format from '../format.js';
import * as state from '../state.js';

const CHARTS = [
  { title: 'Requests', unit: '1/s', unitLabel: 'requests per second', names: [['requests_per_s', 'accepted'], ['errors_per_s', 'failed']] },
  { title: 'Output', unit: '1/s', unitLabel: 'tokens per second', names: [['tokens_per_s', 'tokens']] },
  { title: 'Time to first token', unit: 'ms', unitLabel: 'milliseconds', names: [['ttft_p50_ms', 'p50'], ['ttft_p99_ms', 'p99']] },
  { title: 'KV cache in use', unit: 'share', unitLabel: 'share of blocks', names: [['kv_used', 'in use']] },
];

function Tiles({ totals, rates }) {
  const blocks = totals.total_blocks ? totals.used_blocks / totals.total_blocks : null;
  return html`<dl class="tiles tiles-ten">
    <${Tile} label="Workers ready" value=${`${format.integer(totals.ready)} of ${format.integer(totals.workers)}`} kind=${totals.ready < totals.workers ? 'warning' : ''} />
    <${Tile} label="Requests open" value=${format.integer(totals.requests_open)} detail=${`${format.integer(totals.running)} running, ${format.integer(totals.waiting)} waiting in engines`} />
    <${Tile} label="Requests" value=${format.number(rates.requests_per_s)} detail="per second" />
    <${Tile} label="Output tokens" value=${format.compact(rates.tokens_per_s)} detail="per second" />
    <${Tile} label="Time to first token" value=${format.duration(rates.ttft_p50_ms)} detail=${`p50; p99 ${format.duration(rates.ttft_p99_ms)}`} />
    <${Tile} label="Time between tokens" value=${format.duration(rates.itl_p50_ms)} detail="p50" />
    <${Tile} label="Cache hits" value=${format.percent(rates.hit_rate)} detail="of prompt tokens" />
    <${Tile} label="KV cache in use" value=${format.percent(blocks)} detail=${`${format.compact(totals.used_blocks)} of ${format.compact(totals.total_blocks)} blocks`} kind=${blocks > 0.95 ? 'warning' : ''} />
    <${Tile} label="Errors" value=${format.number(rates.errors_per_s)} detail="per second" kind=${rates.errors_per_s > 0 ? 'critical' : ''} />
    <${Tile} label="Migrations" value=${format.number(rates.migrations_per_s)} detail="per second" kind=${rates.migrations_per_s > 0 ? 'warning' : ''} />
  </dl>`;
}

function WorkerCard({ worker }) {
  return html`<li class=${`worker-card worker-${worker.state}`}>
    <div class="worker-card-head"><${WorkerLink} name=${worker.name} /><${StateBadge} state=${worker.state} /></div>
    <div class="worker-card-row"><span class="muted">batch</span><${Meter} value=${worker.running} maximum=${worker.max_running} label="Requests that run" text=${`${format.integer(worker.running)} / ${format.integer(worker.max_running)}`} /></div>
    <div class="worker-card-row"><span class="muted">KV</span><${Meter} value=${worker.used_blocks} maximum=${worker.total_blocks} label="KV blocks in use" text=${format.percent(worker.total_blocks ? worker.used_blocks / worker.total_blocks : null)} /></div>
    <p class="muted worker-card-note">${worker.role === 'both' ? '' : `${worker.role} · `}${worker.engine}${worker.waiting ? ` · ${format.integer(worker.waiting)} waiting` : ''}</p>
  </li>`;
}

/** At most this many workers are drawn as cards. */
const CARDS = 24;

function Glance({ workers }) {
  if (!workers.length) return html`<${Empty} title="No worker is in the fleet at this position.">Move the slider to a position at which one is, or start one with <code>headwater worker</code>.<//>`;
  const busiest = [...workers].sort((a, b) => b.running + b.waiting - (a.running + a.waiting));
  const shown = workers.length > CARDS ? busiest.slice(0, CARDS) : workers;
  return html`<ul class="worker-cards">${shown.map((worker) => html`<${WorkerCard} key=${worker.name} worker=${worker} />`)}</ul>
    ${workers.length > CARDS ? html`<p class="muted">The ${CARDS} busiest of ${format.integer(workers.length)} workers. <${Link} view="fleet">All workers<//></p>` : null}`;
}

function SmallCharts({ answer }) {
  return html`<div class="small-charts">
    ${CHARTS.map((one) => html`<${Chart} key=${one.title} title=${one.title} unit=${one.unit} unitLabel=${one.unitLabel} height=${110} small=${true} answer=${answer}
      series=${one.names.map(([name, label], index) => ({ name, label, colour: name === 'errors_per_s' ? 1 : index }))} lists=${one.names.map(([name]) => answer.series[name] || [])} marks=${answer.marks} onTime=${goToTime} />`)}
  </div>`;
}

/** The view. */
export function Overview() {
  const window = useSignal(state.windowSeconds);
  const answer = withRetry(useSignal(fleet));
  const series = useAnswerHere('series', { window_s: window, columns: 120 });
  const data = answer.data;
  return html`<${View} title="Overview" answer=${answer} actions=${html`<${WindowSelect} />`}>
    ${data && html`
      <${Panel} title="Findings" className="panel-findings"><${Findings} findings=${data.findings} /><//>
      <${Panel} title="Now" note=${`rates of the last ${windowLabel(data.rates.window_s)}`}><${Tiles} totals=${data.totals} rates=${data.rates} /><//>
      <${Panel} title="The last minutes" actions=${html`<${Link} view="rates">All rates and latencies<//>`}>
        <${Notice} text=${series.data?.notice} />
        ${series.error ? html`<p class="notice">${series.error.message}</p>` : null}
        ${series.data ? html`<${SmallCharts} answer=${series.data} />` : html`<div class="skeleton"></div>`}
      <//>
      <${Panel} title="Fleet" note=${`${format.integer(data.workers.length)} workers`} actions=${html`<${Link} view="fleet">Table and lanes<//>`}><${Glance} workers=${data.workers} /><//>`}
  <//>`;
}
