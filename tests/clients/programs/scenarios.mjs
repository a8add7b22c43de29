// The official clients for JavaScript, `openai` and `@anthropic-ai/sdk`; each outcome is a line of JSON.
//
//     node scenarios.mjs '{"url": …}' FOLDER_WITH_NODE_MODULES

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const task = JSON.parse(process.argv[2]);
const require = createRequire(`${process.argv[3]}/package.json`);
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");

const openai = new OpenAI({ baseURL: `${task.url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: task.url, apiKey: "none", maxRetries: 0 });

const hi = [{ role: "user", content: "Hi" }];
const question = () => [{ role: "user", content: task.question }];

function call(name, given) {
  assert.ok(
    task.calls.some((one) => one.name === name && JSON.stringify(one.arguments) === JSON.stringify(given)),
    `${name} ${JSON.stringify(given)}`,
  );
  return task.results[name];
}

async function chat() {
  const done = await openai.chat.completions.create({ model: task.model, messages: hi });
  assert.equal(done.choices[0].message.content, task.greeting);
}

async function chatStreamed() {
  const stream = await openai.chat.completions.create({ model: task.model, messages: hi, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, task.greeting);
}

async function toolLoop(streamed) {
  const messages = question();
  for (let turn = 0; turn < 3; turn++) {
    const body = { model: task.model, messages, tools: task.tools };
    const done = streamed
      ? await openai.chat.completions.stream(body).finalChatCompletion()
      : await openai.chat.completions.create(body);
    const { message } = done.choices[0];
    if (!message.tool_calls?.length) return assert.equal(message.content, task.answer);
    assert.equal(message.tool_calls.length, task.calls.length);
    messages.push(message);
    for (const one of message.tool_calls) {
      const content = call(one.function.name, JSON.parse(one.function.arguments));
      messages.push({ role: "tool", tool_call_id: one.id, content });
    }
  }
  assert.fail("no answer");
}

async function responsesLoop(streamed) {
  const tools = task.tools.map((tool) => ({ type: "function", strict: false, ...tool.function }));
  let input = question();
  let previous_response_id;
  for (let turn = 0; turn < 3; turn++) {
    const body = { model: task.model, input, tools, previous_response_id };
    const done = streamed
      ? await openai.responses.stream(body).finalResponse()
      : await openai.responses.create(body);
    const calls = done.output.filter((item) => item.type === "function_call");
    if (!calls.length) return assert.equal(done.output_text, task.answer);
    previous_response_id = done.id;
    input = calls.map((one) => ({
      type: "function_call_output",
      call_id: one.call_id,
      output: call(one.name, JSON.parse(one.arguments)),
    }));
  }
  assert.fail("no answer");
}

const pictureUrl = `data:image/png;base64,${task.picture}`;

async function image() {
  const content = [
    { type: "text", text: "What's in this image?" },
    { type: "image_url", image_url: { url: pictureUrl } },
  ];
  const done = await openai.chat.completions.create({ model: task.model, messages: [{ role: "user", content }] });
  assert.equal(done.choices[0].message.content, task.picture_shown);
}

async function audio() {
  const content = [
    { type: "text", text: "What is in this recording?" },
    { type: "input_audio", input_audio: { data: task.sound, format: "wav" } },
  ];
  const done = await openai.chat.completions.create({
    model: task.model,
    modalities: ["text"],
    messages: [{ role: "user", content }],
  });
  assert.equal(done.choices[0].message.content, task.sound_shown);
}

async function responsesImage() {
  const content = [
    { type: "input_text", text: "what's in this image?" },
    { type: "input_image", image_url: pictureUrl },
  ];
  const body = { model: task.model, input: [{ role: "user", content }] };
  assert.equal((await openai.responses.create(body)).output_text, task.picture_shown);
}

const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

async function message(streamed) {
  const body = { model: task.model, max_tokens: 500, messages: hi };
  const done = streamed
    ? await anthropic.messages.stream(body).finalMessage()
    : await anthropic.messages.create(body);
  assert.equal(textOf(done), task.greeting);
  assert.equal(done.stop_reason, "end_turn");
}

async function messageLoop(streamed) {
  const messages = question();
  const tools = task.tools.map(({ function: { name, description, parameters } }) => ({
    name,
    description,
    input_schema: parameters,
  }));
  for (let turn = 0; turn < 3; turn++) {
    const body = { model: task.model, max_tokens: 500, messages, tools };
    const done = streamed
      ? await anthropic.messages.stream(body).finalMessage()
      : await anthropic.messages.create(body);
    if (done.stop_reason !== "tool_use") return assert.equal(textOf(done), task.answer);
    messages.push({ role: "assistant", content: done.content });
    const content = done.content
      .filter((block) => block.type === "tool_use")
      .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: call(block.name, block.input) }));
    assert.equal(content.length, task.calls.length);
    messages.push({ role: "user", content });
  }
  assert.fail("no answer");
}

async function messageWithImage() {
  const source = { type: "base64", media_type: "image/png", data: task.picture };
  const content = [{ type: "image", source }, { type: "text", text: "Describe this image." }];
  const done = await anthropic.messages.create({
    model: task.model,
    max_tokens: 500,
    messages: [{ role: "user", content }],
  });
  assert.equal(textOf(done), task.picture_shown);
}

async function count() {
  const { input_tokens } = await anthropic.messages.countTokens({ model: task.model, messages: hi });
  assert.ok(input_tokens > 2);
}

async function unknownModel() {
  const body = { model: "none", max_tokens: 9, messages: hi };
  await assert.rejects(anthropic.messages.create(body), (error) => error.status === 404 && Boolean(error.requestID));
  await assert.rejects(openai.chat.completions.create(body), { status: 404, code: "model_not_found" });
}

const suites = {
  openai: {
    chat,
    "chat streamed": chatStreamed,
    "tool loop": () => toolLoop(false),
    "tool loop streamed": () => toolLoop(true),
    "responses tool loop": () => responsesLoop(false),
    "responses tool loop streamed": () => responsesLoop(true),
    image,
    audio,
    "responses image": responsesImage,
  },
  "@anthropic-ai/sdk": {
    chat: () => message(false),
    "chat streamed": () => message(true),
    "tool loop": () => messageLoop(false),
    "tool loop streamed": () => messageLoop(true),
    counting: count,
    "unknown model": unknownModel,
    image: messageWithImage,
  },
};

for (const [name, scenarios] of Object.entries(suites)) {
  const { version } = require(`${process.argv[3]}/node_modules/${name}/package.json`);
  for (const [scenario, run] of Object.entries(scenarios)) {
    const began = performance.now();
    let error = "";
    try {
      await run();
    } catch (caught) {
      error = caught.stack ?? String(caught);
    }
    const seconds = (performance.now() - began) / 1000;
    console.log(JSON.stringify({ package: name, version, scenario, error, seconds }));
  }
}
