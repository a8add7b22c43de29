/** The prefix tree: runs of blocks below each other, who holds them on which tier, and how much they are used. */
import { classes, html, useSignal } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { fleet } from '../following.js';
import { Empty, Fields, Link, PositionLink, RequestLink, Select, Tile, Time, View, WindowSelect, WorkerLink, windowLabel } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const TIERS = { gpu: 'GPU', cpu: 'host', disk: 'disk' };

function Run({ run, most }) {
  const level = Math.min(12, run.level ?? 0);
  return html`<span class=${`tree-run indent-${level}`}>
    <span class="tree-branch" aria-hidden="true">${level ? '└' : ''}</span>
    <button type="button" class="event-name code" title=${`first block ${run.first}, last block ${run.last}`} onClick=${() => open(run)}>${format.shortened(String(run.first), 14)}</button>
    <span class="tree-size" aria-hidden="true" style=${{ width: `${Math.max(2, (run.blocks / most) * 60)}px` }}></span>
  </span>`;
}

function Holder({ holder, onOpen }) {
  const tier = TIERS[holder.tier] || holder.tier;
  return html`<button type="button" class=${`holder holder-${holder.tier}`} onClick=${onOpen} title=${`${holder.worker} holds it on ${tier}: how it got there`}>
    ${format.shortened(holder.worker, 16)} <span class="holder-tier">${tier}</span>
  </button>`;
}

/** So many holders of a run are drawn; its details name more. */
const HOLDERS = 2;

function Holders({ run }) {
  if (!run.holders.length) return html`<span class="muted">no worker</span>`;
  const rest = run.holders_total - Math.min(HOLDERS, run.holders.length);
  return html`<span class="holders">
    ${run.holders.slice(0, HOLDERS).map((holder) => html`<${Holder} key=${`${holder.worker} ${holder.tier}`} holder=${holder} onOpen=${() => open(run, holder.worker)} />`)}
    ${rest > 0 ? html`<span class="muted">and ${format.integer(rest)} more</span>` : null}
  </span>`;
}

/** Workers that hold only the beginning of the prompts that lead through a run. */
function Partial({ run }) {
  if (!run.partial.length) return html`<span class="muted">none</span>`;
  const shown = run.partial.slice(0, 2).map((one) => `${format.shortened(one.worker, 16)} to ${format.integer(one.depth)}`).join(', ');
  const rest = run.partial.length - 2;
  return html`<span>${shown}${rest > 0 || run.partial_more ? html` <span class="muted">and ${rest > 0 ? rest : ''}${run.partial_more ? ' or more' : ''} others</span>` : null}</span>`;
}

function Heat({ run, most }) {
  const step = run.uses === 0 ? 0 : Math.max(1, Math.ceil((run.uses / Math.max(1, most)) * 5));
  return html`<span class=${`heat heat-${step}`}>${format.integer(run.uses)}</span>`;
}

function columnsFor(runs) {
  const blocks = Math.max(1, ...runs.map((run) => run.blocks));
  const uses = Math.max(1, ...runs.map((run) => run.uses));
  return [
    { name: 'run', label: 'Run of blocks', render: (run) => html`<${Run} run=${run} most=${blocks} />` },
    { name: 'blocks', label: 'Blocks', align: 'right', render: (run) => format.integer(run.blocks) },
    { name: 'depth', label: 'Begins at', unit: 'block', align: 'right', wide: true, render: (run) => (run.depth < 0 ? format.UNKNOWN : format.integer(run.depth)) },
    { name: 'below', label: 'Below it', unit: 'blocks', align: 'right', wide: true, render: (run) => format.integer(run.below) },
    { name: 'heat', label: 'Uses', title: 'Decisions of the window that found it, or more behind it, cached', align: 'right', render: (run) => html`<${Heat} run=${run} most=${uses} />` },
    { name: 'used', label: 'Last use', align: 'right', wide: true, render: (run) => html`<${Time} value=${run.used_ms} />` },
    { name: 'holders', label: 'Holders', render: (run) => html`<${Holders} run=${run} />` },
    { name: 'partial', label: 'Only a part', unit: 'to block', title: 'Workers that hold the beginning of this prompt but not this run, and to which block', wide: true, render: (run) => html`<${Partial} run=${run} />` },
  ];
}

const keyOf = (run) => `${run.first} ${run.parent} ${run.depth}`;

function open(run, holder) {
  state.adjust({ open: run.first, holder: holder || run.holders[0]?.worker || '' }, 'replace');
}

function Origin({ answer, worker }) {
  if (answer.error) return html`<p class="notice">${answer.error.message}</p>`;
  const data = answer.data;
  if (!data || data.worker !== worker) return html`<div class="skeleton"></div>`;
  if (!data.stored) return html`<p class="muted">The log has no event by which <strong>${worker}</strong> stored its first block: it is older than the log, or too far back.</p>`;
  const { stored, cause } = data;
  return html`<p>${worker} stored its first block on ${TIERS[stored.tier] || stored.tier} at position <${PositionLink} position=${stored.position} />, <${Time} value=${stored.time_ms} precise=${true} />.</p>
    ${cause
      ? html`<p>It is part of the ${cause.part} of request <${RequestLink} id=${cause.request} length=${34} />, which was routed at position <${PositionLink} position=${cause.position} />: <${Link} view="decision" values=${{ id: cause.decision }}>why here<//></p>`
      : html`<p class="muted">No decision before it, of those that the log keeps, had this block in its prompt or answer.</p>`}`;
}

function Details({ run, worker }) {
  const answer = useAnswerHere('origin', worker && { worker, block: run.first });
  const close = () => state.adjust({ open: '', holder: '' }, 'replace');
  const options = [...new Set([worker, ...run.holders.map((one) => one.worker)])].filter(Boolean);
  const rest = run.holders_total - run.holders.length;
  return html`<aside class="event-detail panel" aria-label="The run of blocks">
    <header class="panel-header"><h2>Run of ${format.integer(run.blocks)} blocks</h2><div class="actions"><button type="button" onClick=${close}>Close</button></div></header>
    <${Fields} entries=${[
      ['First block', html`<span class="code">${run.first}</span>`],
      ['Last block', html`<span class="code">${run.last}</span>`],
      ['Uses', run.uses ? html`${format.integer(run.uses)}, the last at <${Time} value=${run.used_ms} precise=${true} />` : 'none in the window'],
      ['Held by', html`${run.holders.map((one) => `${one.worker} (${TIERS[one.tier] || one.tier})`).join(', ') || 'no worker'}${rest > 0 ? `, and ${rest} more` : ''}`],
      ['Only a part', run.partial.length ? `${run.partial.map((one) => `${one.worker} to block ${format.integer(one.depth)} (${TIERS[one.tier] || one.tier})`).join(', ')}${run.partial_more ? ', and others' : ''}` : 'no other worker'],
    ]} />
    ${worker ? html`<h3>How it got there</h3>
      <${Select} label="Worker" value=${worker} options=${options.map((name) => ({ value: name, label: format.shortened(name, 28) }))} onChange=${(holder) => state.adjust({ holder }, 'replace')} />
      <${Origin} answer=${answer} worker=${worker} />
      <p><${WorkerLink} name=${worker} /></p>` : null}
  </aside>`;
}

const DEPTHS = [{ value: '', label: 'All levels' }, ...[1, 2, 3, 5, 8].map((value) => ({ value: String(value), label: value === 1 ? '1 level' : `${value} levels` }))];
const LIMITS = [200, 500, 2000].map((value) => ({ value: String(value), label: `${value} runs` }));

/** The view. */
export function Tree() {
  const values = useSignal(state.parameters);
  const seconds = useSignal(state.windowSeconds);
  const workers = useSignal(fleet).data?.workers || [];
  const limit = values.limit || '200';
  const question = { worker: values.worker, depth: values.depth || -1, limit, window_s: seconds };
  const answer = useAnswerHere('tree', question);
  const data = answer.data;
  const names = [...new Set([...workers.map((worker) => worker.name), ...(values.worker ? [values.worker] : [])])];
  const opened = data?.runs.find((run) => run.first === values.open);
  const actions = html`
    <${Select} label="Worker" value=${values.worker || ''} options=${[{ value: '', label: 'Any' }, ...names.map((name) => ({ value: name, label: format.shortened(name, 28) }))]} onChange=${(worker) => state.adjust({ worker })} />
    <${Select} label="Depth" value=${values.depth || ''} options=${DEPTHS} onChange=${(depth) => state.adjust({ depth })} />
    <${Select} label="Show" value=${limit} options=${LIMITS} onChange=${(chosen) => state.adjust({ limit: chosen === '200' ? '' : chosen })} />
    <${WindowSelect} />`;
  return html`<${View} title="Prefix tree" subtitle="Blocks that requests share, as the index holds them" actions=${actions} answer=${answer}>
    ${data && html`
      <dl class="tiles tiles-few">
        <${Tile} label="Blocks in the index" value=${format.compact(data.blocks)} detail=${`of ${format.integer(data.block_size)} tokens each`} />
        <${Tile} label="Workers that hold blocks" value=${format.integer(data.workers)} />
        <${Tile} label="Runs" value=${format.integer(data.total)} detail=${data.runs.length < data.total ? `${format.integer(data.runs.length)} shown` : ''} />
        <${Tile} label="Decisions that found some" value=${format.integer(data.uses)} detail=${`in ${windowLabel(data.window_s)}`} />
        <${Tile} label="Blocks refused" value=${format.integer(data.refused)} detail="the index was full" kind=${data.refused ? 'warning' : ''} />
      </dl>
      <div class=${classes('events', opened && 'events-with-detail')}>
        <div class="events-list"><${Table} label="Runs of blocks" columns=${columnsFor(data.runs)} rows=${data.runs} keyOf=${keyOf} onOpen=${(run) => open(run)} isSelected=${(run) => run.first === values.open}
        empty=${html`<${Empty} title="No worker has announced a cached block by this position.">Requests with prompts longer than a block fill the index. Move the slider to a later position.<//>`} /></div>
        ${opened ? html`<${Details} run=${opened} worker=${values.holder} />` : null}
      </div>`}
  <//>`;
}
