// Vercel's AI SDK against a gateway: a turn with a tool, in the three APIs that it speaks.
//
//     node tests/e2e/clients/vercel.mjs FOLDER API URL MODEL [URL MODEL...]
//
// FOLDER has the node_modules. Prints a JSON object a backend, as frameworks.py does.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, api, ...backends] = process.argv.slice(2);
const { resolve } = createRequire(`${folder}/`);
const load = (name) => import(pathToFileURL(resolve(name)));
const { streamText, stepCountIs, tool } = await load("ai");
const { z } = await load("zod");

const MODELS = {
  chat: async (baseURL, model) => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${baseURL}/v1`, apiKey: "any" }).chat(model),
  responses: async (baseURL, model) => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${baseURL}/v1`, apiKey: "any" }).responses(model),
  anthropic: async (baseURL, model) => (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${baseURL}/v1`, apiKey: "any" })(model),
  google: async (baseURL, model) => (await load("@ai-sdk/google")).createGoogleGenerativeAI({ baseURL: `${baseURL}/v1beta`, apiKey: "any" })(model),
};

for (let at = 0; at < backends.length; at += 2) {
  const called = [];
  const tools = {
    get_current_weather: tool({
      description: "The weather in a place.",
      inputSchema: z.object({ location: z.string() }),
      execute: async ({ location }) => {
        called.push(location);
        return "Rain.";
      },
    }),
  };
  const answer = streamText({
    model: await MODELS[api](backends[at], backends[at + 1]),
    prompt: "How is the weather in London today?",
    tools,
    temperature: 0,
    maxOutputTokens: 100,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
    onError: ({ error }) => {
      throw error;
    },
  });
  console.log(JSON.stringify({ called, text: await answer.text }));
}
