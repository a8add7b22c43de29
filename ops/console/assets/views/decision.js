/** Why a request went where it went: every candidate, and what another policy or other weights would have chosen. */
import { html, useSignal, useState } from '../library.js';
import { useAnswer, useAnswerHere, useKnown } from '../answers.js';
import { Candidates, TermLegend, cost, costScale, termNames } from '../candidates.js';
import { step } from '../moving.js';
import { Badge, Empty, Fields, Link, Panel, PositionLink, RequestLink, Select, SmallTable, Time, View, WorkerLink } from '../parts.js';
import * as format from '../format.js';
import * as state from '../state.js';

function Verdict({ decision }) {
  const margin = format.isNumber(decision.margin) ? html` The next best costs ${cost(decision.margin, decision.unit)} more.` : ' It was the only candidate.';
  return html`<div class="verdict">
    <p class="verdict-line">Request <${RequestLink} id=${decision.request} length=${34} /> went to <strong><${WorkerLink} name=${decision.chosen} /></strong>: ${decision.why}.${margin}</p>
    ${decision.degraded ? html`<p><${Badge} kind="warning">degraded<//> It was decided without all of the state that a decision needs.</p>` : null}
  </div>`;
}

function Facts({ decision }) {
  return html`<${Fields} className="facts" entries=${[
    ['Decided at', html`<${PositionLink} position=${decision.position} />`],
    ['Stored at', html`<${PositionLink} position=${decision.stored} />`],
    ['Time', html`<${Time} value=${decision.time_ms} precise=${true} />`],
    ['Prompt', `${format.integer(decision.prompt_tokens)} tokens in ${format.integer(decision.blocks)} full blocks`],
    ['Policy', decision.policy],
    ['Candidates compared', format.integer(decision.scored)],
    ['Waited in the queue', format.duration(decision.waited_ms)],
    ['Leg', decision.leg],
    ['Router', decision.router],
    ['Tenant', decision.tenant ? html`<span class="code">${decision.tenant}</span>` : undefined],
    ['Temperature', format.number(decision.temperature)],
    ['Seed', html`<span class="code">${String(decision.seed)}</span>`],
    ['Recomputable', decision.recomputable ? `yes, by algorithm ${decision.algorithm}` : 'no'],
    ['Weights', Object.entries(decision.weights).map(([name, value]) => `${name} ${format.anything(value)}`).join(', ') || 'defaults'],
  ]} />`;
}

/** How much longer the first token took than expected, once that is known. */
function Regret({ decision }) {
  const { regret_ms: regret, waited_ms: waited, started, led } = decision.found;
  if (format.isNumber(regret)) {
    return html`<p>Regret: <strong class="number">${signed(regret)}</strong> <span class="muted">time to first token, without ${format.duration(waited)} in the queue, minus what the router expected</span></p>`;
  }
  if (led) return html`<p class="muted">The router had no estimate of the time to the first token: there is no regret.</p>`;
  if (started) return html`<p class="muted">Another decision for this request led to its first token.</p>`;
  if (decision.settled) return html`<p class="muted">The request ended without a first token.</p>`;
  return html`<p class="muted">The first token has not come by this position. <${Link} view="decision" values=${{ id: decision.id }} at=${null}>See all that is known<//></p>`;
}

function signed(value) {
  return `${value > 0 ? '+' : value < 0 ? '−' : ''}${format.duration(Math.abs(value))}`;
}

/** What was expected of the chosen worker beside what was found. */
function Outcome({ decision }) {
  const chosen = decision.candidates.find((candidate) => candidate.worker === decision.chosen);
  const { found } = decision;
  const difference = format.isNumber(found?.ttft_ms) && format.isNumber(found?.expected_ttft_ms) ? found.ttft_ms - found.expected_ttft_ms : null;
  const hits = format.isNumber(found?.cached_blocks) && chosen ? format.integer(found.cached_blocks - chosen.cached_blocks) : format.UNKNOWN;
  const row = (name, ...values) => html`<tr><th scope="row">${name}</th>${values.map((value, index) => html`<td key=${index} class="right number">${value}</td>`)}</tr>`;
  return html`<${SmallTable} label="Expected and found" headings=${[['Chosen worker'], ['Expected', true], ['Found', true], ['Difference', true]]}>
      ${row('Time to first token', format.duration(found?.expected_ttft_ms), format.duration(found?.ttft_ms), difference === null ? format.UNKNOWN : signed(difference))}
      ${row('Cached blocks', format.integer(chosen?.cached_blocks), format.integer(found?.cached_blocks), hits)}
    <//>
    <${Regret} decision=${decision} />
    ${decision.later.length ? html`<h3>Afterwards</h3><ul class="plain-list">${decision.later.map((text, index) => html`<li key=${index}>${text}</li>`)}</ul>` : null}`;
}

function Shadows({ shadow, unit }) {
  if (!shadow.length) return html`<p class="muted">No shadow router followed this pool at this decision. <code>headwater shadow</code> starts one.</p>`;
  const headings = [['Policy'], ['Would choose'], ['Judged by'], ['Its choice', true], ['The choice made', true], ['Least']];
  return html`<${SmallTable} label="Choices of shadow routers" headings=${headings}>
    ${shadow.map((one, index) => html`<tr key=${index}>
      <td>${one.policy}</td><td><${WorkerLink} name=${one.worker} /></td><td>${one.judge}</td>
      <td class="right number">${cost(one.score, unit)}</td><td class="right number">${cost(one.chosen_score, unit)}</td><td>${cost(one.least, unit)}</td>
    </tr>`)}
  <//>`;
}

/** Policy and weights of the what-if in the parameters of the view. */
function whatIf(values) {
  return Object.fromEntries(Object.entries(values).filter(([name]) => name === 'policy' || name.startsWith('weight.')));
}

function WhatIfForm({ policies, values, decision }) {
  const [weights, setWeights] = useState(() => whatIf(values));
  const policy = weights.policy ?? '';
  const text = policies.policies.find((one) => one.name === (policy || decision.policy))?.text;
  const set = (name, value) => setWeights({ ...weights, [name]: value });
  const submitted = (event) => {
    event.preventDefault();
    const cleared = Object.fromEntries(Object.keys(whatIf(values)).map((name) => [name, '']));
    state.adjust({ ...cleared, ...weights, id: decision.id });
  };
  const cleared = () => {
    setWeights({});
    state.adjust(Object.fromEntries(Object.keys(whatIf(values)).map((name) => [name, ''])));
  };
  const options = [{ value: '', label: `as decided (${decision.policy})` }, ...policies.policies.map((one) => ({ value: one.name, label: one.name }))];
  return html`<form class="what-if-form" onSubmit=${submitted}>
    <${Select} label="Policy" value=${policy} options=${options} onChange=${(value) => set('policy', value)} />
    ${text ? html`<p class="muted">${text}</p>` : null}
    <details open=${Object.keys(weights).some((name) => name.startsWith('weight.') && weights[name] !== '')}><summary>Weights</summary><div class="weights">
      ${policies.weights.map((weight) => html`<label key=${weight.name}><span>${weight.name}</span>
        <input type="number" step="any" inputmode="decimal" placeholder=${String(decision.weights[weight.name] ?? weight.default)} value=${weights[`weight.${weight.name}`] ?? ''} onInput=${(event) => set(`weight.${weight.name}`, event.currentTarget.value)} /></label>`)}
    </div></details>
    <div class="actions"><button type="submit" class="primary">Compute again</button><button type="button" onClick=${cleared}>Clear</button></div>
  </form>`;
}

function WhatIfResult({ decision, scale, names }) {
  const other = decision.what_if;
  if (!other) return html`<p class="muted">Choose a policy or weights: the server decides again from the recorded inputs and shows the result here, beside the decision.</p>`;
  if (other.problem) return html`<p class="notice" role="note">It cannot be computed again: ${other.problem}</p>`;
  return html`<p><${Badge} kind=${other.same ? 'good' : 'warning'}>${other.same ? 'same worker' : 'another worker'}<//> ${other.policy} would choose <strong><${WorkerLink} name=${other.worker} /></strong>: ${other.why}.</p>
    <${Candidates} label="Candidates of the what-if" candidates=${other.candidates} unit=${decision.unit} blocks=${decision.blocks} chosen=${other.worker} names=${names} scale=${scale} brief=${true} />`;
}

function WhatIf({ decision, scale, names, values }) {
  const policies = useAnswer('policies', {});
  return html`<${Panel} title="What if" note="the same inputs, another policy or other weights">
    <div class="what-if">
      ${policies.data ? html`<${WhatIfForm} key=${`${values.policy || ''}`} policies=${policies.data} values=${values} decision=${decision} />` : html`<div class="skeleton"></div>`}
      <div class="what-if-result"><${WhatIfResult} decision=${decision} scale=${scale} names=${names} /></div>
    </div>
  <//>`;
}

function Content({ decision, values }) {
  const lists = [decision.candidates, decision.what_if?.candidates || []];
  const names = termNames(lists.flat());
  const scale = costScale(lists);
  const more = decision.scored > decision.candidates.length && !values.all;
  return html`
    <${Verdict} decision=${decision} />
    <${Panel} title="Candidates" note="least cost first" actions=${more ? html`<button type="button" onClick=${() => state.adjust({ all: 1, id: decision.id })}>Compute all ${format.integer(decision.scored)}</button>` : null}>
      <${TermLegend} names=${names} unit=${decision.unit} />
      ${decision.candidates.length ? html`<${Candidates} label="Candidates" candidates=${decision.candidates} unit=${decision.unit} blocks=${decision.blocks} chosen=${decision.chosen} names=${names} scale=${scale} />` : html`<${Empty} title="The record has no candidates." />`}
    <//>
    <${WhatIf} decision=${decision} scale=${scale} names=${names} values=${values} />
    <div class="columns"><${Panel} title="Expected and found"><${Outcome} decision=${decision} /><//><${Panel} title="Shadow routers"><${Shadows} shadow=${decision.shadow} unit=${decision.unit} /><//></div>
    <${Panel} title="Facts"><${Facts} decision=${decision} /><//>`;
}

function StepActions() {
  return html`<button type="button" onClick=${() => step('decision', -1)} title="D">Previous decision</button><button type="button" onClick=${() => step('decision', 1)} title="d">Next decision</button>`;
}

function NoDecision() {
  return html`<${View} title="Why here" actions=${html`<${StepActions} />`}><${Empty} title="The log holds no decision up to this position.">Move the slider to a later position, or press d for the next decision.<//><//>`;
}

/** The view: the decision with this id, or without one the newest at the position. */
export function Decision() {
  const values = useSignal(state.parameters);
  const { id, all } = values;
  const newest = useAnswerHere('events', id ? null : { kind: 'route', event: 'route.decided', limit: 1 });
  const shown = id || newest.data?.events[0]?.fields.request;
  const asked = useKnown('decision', shown ? { id: shown, all, ...whatIf(values) } : null, (data) => data.settled);
  if (!id && newest.data && !shown) return html`<${NoDecision} />`;
  const answer = shown ? asked : newest;
  if (asked.error?.code === 'not_yet') return html`<${View} title="Why here" actions=${html`<${StepActions} />`}><${Empty} title="This decision is not made yet at the position shown.">Move the slider to a later position, or <${Link} view="decision" values=${{ id: shown }} at=${null}>see all that is known<//>.<//><//>`;
  const subtitle = shown && answer.data && html`<span class="code">${answer.data.id}</span>${id ? html` <${Link} view="decision" className="subtle-link">follow the position instead<//>` : html`<span class="muted"> the newest decision at this position</span>`}`;
  return html`<${View} title="Why here" subtitle=${subtitle} answer=${answer} actions=${html`<${StepActions} />`}>
    ${shown && answer.data && html`<${Content} decision=${answer.data} values=${values} />`}
  <//>`;
}
