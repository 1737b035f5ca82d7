// Draws /openapi.json: every route, what it takes and what it answers. Nothing comes from elsewhere.

const at = (id) => document.getElementById(id);
const STORED_KEY = "vmserve-key";

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

// -- schemas ---------------------------------------------------------------------------------

const nameOf = (reference) => reference.split("/").pop();

/** What a value may be, in a few words: "integer, 1 to 128, or null". */
function words(schema) {
  if (!schema || schema === true) return "anything";
  if (schema.$ref) return nameOf(schema.$ref);
  for (const several of ["anyOf", "oneOf"]) {
    if (schema[several]) return [...new Set(schema[several].map(words))].join(" or ");
  }
  if (schema.allOf) return schema.allOf.map(words).join(" and ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (Array.isArray(schema.type)) {
    return schema.type.map((type) => words({ ...schema, type })).join(" or ");
  }
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const most = schema.maximum ?? schema.exclusiveMaximum;
  let range = "";
  if (least !== undefined && most !== undefined) range = ` from ${least} to ${most}`;
  else if (least !== undefined) range = ` from ${least}`;
  else if (most !== undefined) range = ` up to ${most}`;
  if (schema.type === "array") {
    const limit = schema.maxItems === undefined ? "" : `, at most ${schema.maxItems}`;
    return `list of ${words(schema.items)}${limit}`;
  }
  return (schema.type ?? "anything") + range;
}

function propertiesTable(schema) {
  const body = element("tbody");
  for (const [name, property] of Object.entries(schema.properties ?? {})) {
    const needed = (schema.required ?? []).includes(name) ? " (required)" : "";
    const fallback = property.default === undefined || property.default === null
      ? "" : JSON.stringify(property.default);
    body.append(element("tr", "",
      element("th", name + needed), element("td", words(property)), element("td", fallback),
      element("td", property.description ?? "")));
  }
  const head = element("tr", "", ...["Field", "Value", "Default", ""].map((t) => element("th", t)));
  return element("table", "", element("thead", "", head), body);
}

function schemaView(schema) {
  if (schema?.properties) return propertiesTable(schema);
  return element("p", words(schema));
}

// -- routes ----------------------------------------------------------------------------------

function contentViews(content) {
  return Object.entries(content ?? {}).map(([type, { schema }]) =>
    element("div", "", element("p", type), schemaView(schema)));
}

function operationView(path, method, operation) {
  const view = element("details", "", element("summary", "",
    element("code", `${method.toUpperCase()} ${path}`), ` ${operation.summary ?? ""}`));
  if (operation.description) view.append(element("p", operation.description));
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    view.append(element("h3", "Parameters"));
    view.append(element("ul", "", ...parameters.map((parameter) =>
      element("li", `${parameter.name} (in the ${parameter.in}): ${words(parameter.schema)}`))));
  }
  if (operation.requestBody) {
    view.append(element("h3", "Takes"), ...contentViews(operation.requestBody.content));
  }
  view.append(element("h3", "Answers"));
  for (const [status, reply] of Object.entries(operation.responses ?? {})) {
    const label = status === "default" ? "otherwise" : status;
    view.append(element("p", `${label}: ${reply.description}`), ...contentViews(reply.content));
  }
  return view;
}

function draw(specification) {
  const main = document.querySelector("main");
  const byTag = new Map();
  for (const [path, operations] of Object.entries(specification.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      if (!byTag.has(tag)) byTag.set(tag, []);
      byTag.get(tag).push(operationView(path, method, operation));
    }
  }
  const sections = [...byTag].map(([tag, views]) =>
    element("section", "", element("h2", tag), ...views));
  const schemas = Object.entries(specification.components?.schemas ?? {}).map(([name, schema]) =>
    element("details", "", element("summary", name), schemaView(schema)));
  main.replaceChildren(...sections, element("section", "", element("h2", "Schemas"), ...schemas));
  main.hidden = false;
  at("state").textContent = `${specification.info.title} ${specification.info.version}`;
  at("state").className = "live";
}

// -- loading ---------------------------------------------------------------------------------

function askForKey(told) {
  at("key-form").hidden = false;
  at("key-told").textContent = told;
  at("state").textContent = "needs a key";
  at("key").focus();
}

async function load() {
  const key = sessionStorage.getItem(STORED_KEY);
  if (document.documentElement.dataset.key === "required" && key === null) return askForKey("");
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  try {
    const reply = await fetch("openapi.json", { headers, cache: "no-store" });
    if (reply.status === 401) {
      sessionStorage.removeItem(STORED_KEY);
      return askForKey(key === null ? "" : "The server does not know this key.");
    }
    if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
    draw(await reply.json());
  } catch (error) {
    at("state").textContent = error.message;
    at("state").className = "away";
  }
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED_KEY, at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  load();
});
load();
