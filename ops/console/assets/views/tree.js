/** The prefix tree: runs of blocks below each other, who holds them on which tier, and how much they are used. */
import { html, useSignal } from '../library.js';
import { useAnswer } from '../answers.js';
import { fleet } from '../following.js';
import { Empty, Select, Tile, View } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const TIERS = { gpu: 'GPU', cpu: 'host', disk: 'disk' };

function Run({ run, most }) {
  const level = Math.min(12, run.level ?? 0);
  return html`<span class=${`tree-run indent-${level}`}>
    <span class="tree-branch" aria-hidden="true">${level ? '└' : ''}</span>
    <span class="code" title=${`first block ${run.first}, last block ${run.last}`}>${format.shortened(String(run.first), 14)}</span>
    <span class="tree-size" aria-hidden="true" style=${{ width: `${Math.max(2, (run.blocks / most) * 60)}px` }}></span>
  </span>`;
}

function Holder({ holder, blocks }) {
  const tier = TIERS[holder.tier] || holder.tier;
  const part = holder.blocks < blocks ? html` <span class="number">${holder.blocks}/${blocks}</span>` : null;
  const title = `${holder.worker} holds ${holder.blocks ?? blocks} of ${blocks} blocks on ${tier}`;
  return html`<button type="button" class=${`holder holder-${holder.tier}`} onClick=${() => state.adjust({ panel: holder.worker })} title=${title}>
    ${format.shortened(holder.worker, 16)} <span class="holder-tier">${tier}</span>${part}
  </button>`;
}

/** So many holders of a run are drawn; the title of the rest names them. */
const HOLDERS = 4;

function Holders({ run }) {
  if (!run.holders.length) return html`<span class="muted">no worker</span>`;
  const rest = run.holders.slice(HOLDERS);
  const names = rest.map((holder) => `${holder.worker} (${TIERS[holder.tier] || holder.tier})`).join(', ');
  return html`<span class="holders">
    ${run.holders.slice(0, HOLDERS).map((holder) => html`<${Holder} key=${`${holder.worker} ${holder.tier}`} holder=${holder} blocks=${run.blocks} />`)}
    ${rest.length ? html`<span class="muted" title=${names}>and ${rest.length} more</span>` : null}
  </span>`;
}

function Heat({ heat, most }) {
  if (!format.isNumber(heat)) return html`<span class="muted">unknown</span>`;
  const step = heat === 0 ? 0 : Math.max(1, Math.ceil((heat / Math.max(1, most)) * 5));
  return html`<span class=${`heat heat-${step}`}>${format.integer(heat)}</span>`;
}

function columnsFor(runs) {
  const blocks = Math.max(1, ...runs.map((run) => run.blocks));
  const heat = Math.max(1, ...runs.map((run) => run.heat || 0));
  return [
    { name: 'run', label: 'Run of blocks', render: (run) => html`<${Run} run=${run} most=${blocks} />` },
    { name: 'blocks', label: 'Blocks', align: 'right', render: (run) => format.integer(run.blocks) },
    { name: 'depth', label: 'Begins at', unit: 'block', align: 'right', wide: true, render: (run) => format.integer(run.depth) },
    { name: 'below', label: 'Below it', unit: 'blocks', align: 'right', wide: true, render: (run) => format.integer(run.below) },
    { name: 'heat', label: 'Requests', title: 'Requests of the last minutes whose prompt went through it', align: 'right', render: (run) => html`<${Heat} heat=${run.heat} most=${heat} />` },
    { name: 'holders', label: 'Holders', render: (run) => html`<${Holders} run=${run} />` },
  ];
}

const DEPTHS = [{ value: '', label: 'All levels' }, ...[1, 2, 3, 5, 8].map((value) => ({ value: String(value), label: value === 1 ? '1 level' : `${value} levels` }))];
const LIMITS = [200, 500, 2000].map((value) => ({ value: String(value), label: `${value} runs` }));

/** The view. */
export function Tree() {
  const position = useSignal(state.position);
  const values = useSignal(state.parameters);
  const workers = useSignal(fleet).data?.workers || [];
  const limit = values.limit || '200';
  const question = { at: position, worker: values.worker, depth: values.depth || -1, limit };
  const answer = useAnswer('tree', position === null ? null : question);
  const data = answer.data;
  const names = [...new Set([...workers.map((worker) => worker.name), ...(values.worker ? [values.worker] : [])])];
  const actions = html`
    <${Select} label="Worker" value=${values.worker || ''} options=${[{ value: '', label: 'Any' }, ...names.map((name) => ({ value: name, label: format.shortened(name, 28) }))]} onChange=${(worker) => state.adjust({ worker })} />
    <${Select} label="Depth" value=${values.depth || ''} options=${DEPTHS} onChange=${(depth) => state.adjust({ depth })} />
    <${Select} label="Show" value=${limit} options=${LIMITS} onChange=${(chosen) => state.adjust({ limit: chosen === '200' ? '' : chosen })} />`;
  return html`<${View} title="Prefix tree" subtitle="Blocks that requests share, as the index holds them" actions=${actions} answer=${answer}>
    ${data && html`
      <dl class="tiles tiles-few">
        <${Tile} label="Blocks in the index" value=${format.compact(data.blocks)} detail=${`of ${format.integer(data.block_size)} tokens each`} />
        <${Tile} label="Workers that hold blocks" value=${format.integer(data.workers)} />
        <${Tile} label="Runs" value=${format.integer(data.total)} detail=${data.runs.length < data.total ? `${format.integer(data.runs.length)} shown` : ''} />
        <${Tile} label="Blocks refused" value=${format.integer(data.refused)} detail="the index was full" kind=${data.refused ? 'warning' : ''} />
      </dl>
      <${Table} label="Runs of blocks" columns=${columnsFor(data.runs)} rows=${data.runs} keyOf=${(run) => `${run.first} ${run.parent} ${run.depth}`}
        empty=${html`<${Empty} title="No worker has announced a cached block by this position.">Requests with prompts longer than a block fill the index. Move the slider to a later position.<//>`} />`}
  <//>`;
}
