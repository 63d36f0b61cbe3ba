// Measures the real binary through the official SDK. Figures are of one run on
// one machine; compare ratios, not milliseconds.
//
//   node test/bench.mjs POSTERN [RUNS]
import { execFileSync, spawn } from 'node:child_process'
import { mkdtempSync, openSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const postern = resolve(process.argv[2])
const runs = Number(process.argv[3] ?? 20)
const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
const log = join(dir, 'log')
const out = openSync(log, 'w')
const server = spawn(postern, ['up', '--data', dir, '--listen', '127.0.0.1:3400', '--smtp', '127.0.0.1:3425', '--max-sandboxes', '60'], {
  stdio: ['ignore', out, out],
})
const ended = new Promise((r) => server.on('exit', r))
process.on('exit', () => server.kill('SIGKILL'))
for (let i = 0; !readFileSync(log, 'utf8').includes('setup?token'); i++) {
  if (i > 300) throw new Error(readFileSync(log, 'utf8'))
  await sleep(100)
}
Object.assign(process.env, {
  E2B_API_URL: 'http://127.0.0.1:3400',
  E2B_SANDBOX_URL: 'http://127.0.0.1:3400',
  E2B_API_KEY: readFileSync(log, 'utf8').match(/e2b_[0-9a-f]{40}/)[0],
})
const { Sandbox } = require('@e2b/code-interpreter')

const percentile = (xs, p) => xs.toSorted((a, b) => a - b)[Math.min(xs.length - 1, Math.floor(xs.length * p))]
function report(name, xs, unit = 'ms', digits = 1) {
  const f = (x) => x.toFixed(digits)
  console.log(`${name.padEnd(46)} p50 ${f(percentile(xs, 0.5))}  p95 ${f(percentile(xs, 0.95))}  p99 ${f(percentile(xs, 0.99))} ${unit}  (n=${xs.length})`)
  return percentile(xs, 0.5)
}
async function time(f) {
  const t = performance.now()
  await f()
  return performance.now() - t
}

// The processes of all sandboxes are in cgroups below "postern".
function memoryMB() {
  let kb = 0
  for (const pid of readdirSync('/proc').filter((p) => /^\d+$/.test(p))) {
    try {
      if (!/postern/.test(readFileSync(`/proc/${pid}/cgroup`, 'utf8'))) continue
      kb += Number(readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8').match(/^Pss:\s+(\d+)/m)[1])
    } catch {
      // It has ended.
    }
  }
  return kb / 1024
}

const first = []
for (let i = 0; i < runs; i++) {
  let s
  first.push(await time(async () => {
    s = await Sandbox.create()
    await s.commands.run('echo')
  }))
  await s.kill()
}
const cold = report('create → first echo (cold start)', first)
const python = []
for (let i = 0; i < Math.min(runs, 10); i++) {
  const s = await Sandbox.create()
  python.push(await time(() => s.runCode('1')))
  await s.kill()
}
report('runCode right after create (interpreter starts)', python)

const s = await Sandbox.create()
await s.runCode('1')
const run = []
for (let i = 0; i < 100; i++) run.push(await time(() => s.commands.run('true')))
const command = report('commands.run("true"), a login shell', run)
const code = []
for (let i = 0; i < 50; i++) code.push(await time(() => s.runCode('1')))
report('runCode("1"), warm', code)
const big = new Blob([Buffer.alloc(64 << 20, 'x')])
const up = []
const down = []
for (let i = 0; i < 5; i++) {
  up.push((64 * 1.048576) / ((await time(() => s.files.write('/tmp/big', big))) / 1000))
  down.push((64 * 1.048576) / ((await time(() => s.files.read('/tmp/big', { format: 'bytes' }))) / 1000))
}
report('file write, 64 MiB', up, 'MB/s', 0)
report('file read, 64 MiB', down, 'MB/s', 0)
await s.kill()

await sleep(500)
const before = memoryMB()
const many = []
for (let i = 0; i < 10; i++) many.push(await Sandbox.create())
await Promise.all(many.map((x) => x.runCode('1')))
await sleep(2000)
console.log(`${'memory of a sandbox with its interpreter'.padEnd(46)} ${((memoryMB() - before) / many.length).toFixed(1)} MiB PSS (of 10)`)
await Promise.all(many.map((x) => x.kill()))
console.log(`${'ratio: first echo to a command in a running one'.padEnd(46)} ${(cold / command).toFixed(1)}`)

server.kill('SIGTERM')
await ended
rmSync(dir, { recursive: true, force: true })
