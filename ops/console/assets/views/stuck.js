/** Requests that do not get on: what each waits for, and what helps. */
import { html, useSignal } from '../library.js';
import { useAnswerHere } from '../answers.js';
import { Empty, RequestLink, StateBadge, Time, View, WorkerLink } from '../parts.js';
import * as format from '../format.js';
import * as state from '../state.js';

function StuckRequest({ one }) {
  return html`<li class="stuck">
    <div class="stuck-head"><${RequestLink} id=${one.request} length=${34} /><${StateBadge} state=${one.state} /><span class="number"><strong>${format.duration(one.for_ms)}</strong> since <${Time} value=${one.since_ms} /></span></div>
    <p><span class="muted">Waits for</span> ${one.waits_for}${one.worker ? html` <span class="muted">at</span> <${WorkerLink} name=${one.worker} />` : null}</p>
    ${one.remedy ? html`<p class="remedy"><span class="remedy-label">What to do:</span> ${one.remedy}</p>` : null}
  </li>`;
}

/** The view. */
export function Stuck() {
  const answer = useAnswerHere('stuck', {});
  const stuck = answer.data ? [...answer.data.stuck].sort((a, b) => b.for_ms - a.for_ms) : [];
  const subtitle = answer.data && (stuck.length === 1 ? '1 request does not get on' : `${stuck.length} requests do not get on`);
  return html`<${View} title="Stuck requests" subtitle=${subtitle} answer=${answer}>
    ${stuck.length ? html`<ul class="stuck-list">${stuck.map((one) => html`<${StuckRequest} key=${one.request} one=${one} />`)}</ul>`
      : html`<${Empty} title="No request is stuck at this position.">A request counts as stuck when it waits for something that will not happen, or for much longer than others.<//>`}
  <//>`;
}
