/** Routers that fold the same log: do they hold the same state? */
import { html, useSignal } from '../library.js';
import { useAnswer } from '../answers.js';
import { Badge, Empty, PositionLink, View } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const COLUMNS = [
  { name: 'router', label: 'Router', render: (one) => one.router },
  { name: 'agrees', label: 'State', render: (one) => (one.agrees === null ? html`<${Badge} title="No digest to compare with">not compared<//>` : html`<${Badge} kind=${one.agrees ? 'good' : 'critical'}>${one.agrees ? 'agrees' : 'differs'}<//>`) },
  { name: 'position', label: 'Folded up to', align: 'right', render: (one) => html`<${PositionLink} position=${one.position} />` },
  { name: 'digest', label: 'Digest', render: (one) => html`<span class="code">${one.digest || format.UNKNOWN}</span>` },
  { name: 'epoch', label: 'Epoch', align: 'right', render: (one) => format.integer(one.epoch) },
  { name: 'release', label: 'Release', render: (one) => one.release || format.UNKNOWN },
];

function Verdict({ replicas }) {
  const different = replicas.filter((one) => one.agrees === false);
  if (!replicas.length) return null;
  if (different.length) {
    return html`<div class="problem" role="note"><p><strong>${different.map((one) => one.router).join(', ')} ${different.length === 1 ? 'holds' : 'hold'} another state than the others at the same position.</strong></p>
      <p>Its decisions may differ. Restart it: it then folds the log again from the latest snapshot. Keep its logs, and report the difference.</p></div>`;
  }
  return html`<p class="muted">The state is a pure function of the log: replicas at the same position must have the same digest.</p>`;
}

/** The view. */
export function Replicas() {
  const position = useSignal(state.position);
  const live = useSignal(state.live);
  const answer = useAnswer('replicas', live ? { at: position } : {});
  const replicas = answer.data?.replicas || [];
  return html`<${View} title="Replicas" subtitle="Routers of this pool, now" answer=${answer}>
    <${Verdict} replicas=${replicas} />
    ${answer.data && html`<${Table} label="Routers" columns=${COLUMNS} rows=${replicas} keyOf=${(one) => `${one.router} ${one.epoch}`}
      empty=${html`<${Empty} title="No router has reported its digest.">Routers do so every few seconds. A recorded log has none.<//>`} />`}
  <//>`;
}
