/** One request: where its time went, what decided it, how it ended. */
import { html, useSignal } from '../library.js';
import { useKnown } from '../answers.js';
import { Badge, Empty, Fields, Link, Panel, PositionLink, SmallTable, StateBadge, Time, View, WorkerLink } from '../parts.js';
import { Waterfall } from '../waterfall.js';
import * as format from '../format.js';
import * as state from '../state.js';

function Facts({ request }) {
  const media = request.media?.length ? request.media.map((one) => `${one.kind} ${one.id} (${one.tokens} tokens)`).join(', ') : undefined;
  return html`<${Fields} className="facts" entries=${[
    ['Accepted', html`<${Time} value=${request.accepted_ms} precise=${true} />`],
    ['State', html`<${StateBadge} state=${request.state} />${request.reason ? html` <${StateBadge} state=${request.reason} />` : null}`],
    ['First token', format.duration(request.ttft_ms)],
    ['Duration', format.duration(request.duration_ms)],
    ['Prompt', `${format.integer(request.prompt_tokens)} tokens`],
    ['Cached', `${format.integer(request.cached_tokens)} tokens`],
    ['Output', `${format.integer(request.completion_tokens)} of at most ${format.integer(request.max_tokens)} tokens`],
    ['Migrations', format.integer(request.migrations)],
    ['Endpoint', html`<span class="code">${request.endpoint}</span>`],
    ['Model', request.model],
    ['Choices', request.choices > 1 ? format.integer(request.choices) : undefined],
    ['Streamed', format.anything(request.stream)],
    ['Trace', request.trace ? html`<span class="code">${request.trace}</span>` : undefined],
    ['Media', media],
    ['Positions', html`<${PositionLink} position=${request.decided_position} /> to <${PositionLink} position=${request.position_end} />`],
  ]} />`;
}

const MARK_KINDS = { failure: 'critical', ended: 'neutral' };

function Marks({ marks }) {
  return html`<ol class="plain-list">${marks.map((mark, index) => html`<li key=${index}>
    <${Time} value=${mark.time_ms} precise=${true} /> <${Badge} kind=${MARK_KINDS[mark.kind] || 'info'}>${mark.kind}<//>${' '}
    ${mark.text === mark.kind ? '' : mark.text} ${mark.worker ? html`<${WorkerLink} name=${mark.worker} />` : null}
  </li>`)}</ol>`;
}

function Decisions({ decisions }) {
  if (!decisions.length) return html`<p class="muted">No decision for it is in the log: it waits for one, or ended before.</p>`;
  const headings = [['Decision'], ['Time'], ['Worker'], ['Leg'], ['Waited', true], ['Policy'], ['Stored at', true]];
  return html`<${SmallTable} label="Decisions" headings=${headings}>
    ${decisions.map((one) => html`<tr key=${one.id}>
      <td><${Link} view="decision" values=${{ id: one.id }}>Why here<//></td>
      <td><${Time} value=${one.time_ms} precise=${true} /></td>
      <td><${WorkerLink} name=${one.worker} /></td>
      <td>${one.leg || 'both'}</td>
      <td class="right number">${format.duration(one.waited_ms)}</td>
      <td>${one.policy}</td>
      <td class="right"><${PositionLink} position=${one.stored} /></td>
    </tr>`)}
  <//>`;
}

function Contents({ contents }) {
  return html`<${Panel} title="Contents" note="as the edge recorded them">
    <h3>Request</h3><pre class="contents" tabindex="0">${readable(contents.body)}</pre>
    ${contents.answers.map((text, index) => html`<h3 key=${`h${index}`}>Answer ${contents.answers.length > 1 ? index + 1 : ''}</h3><pre key=${index} class="contents" tabindex="0">${text}</pre>`)}
  <//>`;
}

/** JSON with line breaks; anything else as it is. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Content({ data }) {
  const first = format.isNumber(data.decided_position) ? data.decided_position : null;
  return html`
    ${data.state === 'ended' ? null : html`<p class="muted">It is open at this position: what came later is not shown. <${Link} view="request" values=${{ id: data.id }} at=${null}>See all that is known<//></p>`}
    ${data.error ? html`<p class="problem" role="note"><strong>It failed:</strong> ${data.error}</p>` : null}
    <${Panel} title="Facts" actions=${first ? html`<button type="button" onClick=${() => state.goTo(first)}>Go to its decision</button>` : null}><${Facts} request=${data} /><//>
    <${Panel} title="Where its time went" note="open a span for its details">${data.spans.length ? html`<${Waterfall} request=${data} time=${data.time_ms} />` : html`<${Empty} title="The log holds no leg of this request." />`}<//>
    <div class="columns"><${Panel} title="Marks"><${Marks} marks=${data.marks} /><//><${Panel} title="Decisions"><${Decisions} decisions=${data.decisions} /><//></div>
    ${data.explanation?.length ? html`<${Panel} title="Explanation" note="as headwater explain prints it"><pre class="explanation" tabindex="0" aria-label="Explanation">${data.explanation.join('\n')}</pre><//>` : null}
    ${data.contents ? html`<${Contents} contents=${data.contents} />` : null}`;
}

function Named({ id }) {
  const answer = useKnown('request', { id }, (data) => data.state === 'ended');
  const early = answer.error?.code === 'not_yet';
  return html`<${View} title="Request" subtitle=${html`<span class="code">${id}</span>`} answer=${early ? undefined : answer} actions=${html`<${Link} view="requests" className="button">All requests<//>`}>
    ${early ? html`<${Empty} title="This request is not accepted yet at the position shown.">Move the slider to a later position, or <${Link} view="request" values=${{ id }} at=${null}>see all that is known<//>.<//>` : answer.data && html`<${Content} data=${answer.data} />`}
  <//>`;
}

/** The view. */
export function Request() {
  const { id } = useSignal(state.parameters);
  if (!id) return html`<${View} title="Request"><${Empty} title="No request is chosen."><${Link} view="requests">Choose one from the list<//> or open the palette with Ctrl K and type its identifier.<//><//>`;
  return html`<${Named} key=${id} id=${id} />`;
}
