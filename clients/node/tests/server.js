// Starts real servers and programs for tests, and stops them when a test file ends.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";

const running = new Set();

after(() => {
  for (const child of running) child.kill("SIGKILL");
});

export const repository = fileURLToPath(new URL("../../../", import.meta.url));

/** Starts a server with these rules in YAML. */
export async function startServer(rules = "", { listen = "127.0.0.1:0", more = "", env } = {}) {
  const folder = mkdtempSync(join(tmpdir(), "tidegate-node-"));
  const config = join(folder, "tidegate.yaml");
  const listeners = `listen: {http: ${listen}, resp: off, grpc: off, admin: off}\n`;
  writeFileSync(config, `${listeners}${more}\n${rules === "" ? "" : `rules:\n${rules}`}\n`);
  const program = process.env.TIDEGATE_BIN;
  if (program === undefined) throw new Error("TIDEGATE_BIN is not set; run clients/node/test");
  const listening = /listener="http" address=(\S+)/;
  const started = await start(program, ["serve", "--config", config], listening, { env });
  started.child.once("exit", () => rmSync(folder, { recursive: true, force: true }));
  return { ...started, address: started.match[1], url: `http://${started.match[1]}` };
}

/** Starts a program, and waits until its output matches. */
export function start(program, args, ready, { cwd, env } = {}) {
  const child = spawn(program, args, { cwd, env: { ...process.env, NO_COLOR: "1", ...env } });
  running.add(child);
  const exited = new Promise((resolve) => child.once("exit", resolve));
  void exited.then(() => running.delete(child));
  const stop = async (signal = "SIGKILL") => {
    child.kill(signal);
    await exited;
  };
  let output = "";
  return new Promise((resolve, reject) => {
    const read = (chunk) => {
      output += chunk;
      const match = ready.exec(output);
      if (match) resolve({ child, exited, stop, match, output: () => output });
    };
    child.stdout.on("data", read);
    child.stderr.on("data", read);
    child.once("error", reject);
    child.once("exit", (code) => reject(new Error(`${program} exited with ${code}:\n${output}`)));
  });
}

/** Runs a program until it exits, and returns its standard output. */
export function run(program, args, { cwd, env, input } = {}) {
  const child = spawn(program, args, { cwd, env: { ...process.env, ...env } });
  running.add(child);
  child.stdin.end(input);
  let out = "";
  let said = "";
  child.stdout.on("data", (chunk) => (out += chunk));
  child.stderr.on("data", (chunk) => (said += chunk));
  return new Promise((resolve, reject) => {
    child.once("error", reject);
    child.once("close", (code) => {
      running.delete(child);
      if (code === 0) resolve(out);
      else reject(new Error(`${program} exited with ${code}:\n${out}${said}`));
    });
  });
}

/** Returns how often each status occurs. */
export function tally(statuses) {
  const counts = {};
  for (const status of statuses) counts[status] = (counts[status] ?? 0) + 1;
  return counts;
}

/**
 * Returns a port that no program uses. Another program can take the port before the caller uses it:
 * Node.js cannot bind a socket without listening, so it cannot reserve a port.
 */
export async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return String(port);
}
