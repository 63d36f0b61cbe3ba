// Measures the real binary through the official SDK. Figures are of one run on
// one machine; compare ratios, not milliseconds. Three servers run one after
// the other on the same root file system: one whose sandboxes boot, one whose
// sandboxes are restored from the template's snapshot when they are asked for,
// and one that has restored some beforehand.
//
//   node test/bench.mjs POSTERN [RUNS] [DENSITY]
import { spawn } from 'node:child_process'
import { mkdtempSync, openSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'

const require = createRequire(new URL('../demo/package.json', import.meta.url))
const { Sandbox } = require('@e2b/code-interpreter')
const postern = resolve(process.argv[2])
const runs = Number(process.argv[3] ?? 20)
const density = Number(process.argv[4] ?? 0)

const percentile = (xs, p) => xs.toSorted((a, b) => a - b)[Math.min(xs.length - 1, Math.floor(xs.length * p))]
const median = (xs) => percentile(xs, 0.5)
// Milliseconds are shown as a part of a cold start too, once that is known.
let coldStart = 0
function report(name, xs, unit = 'ms', digits = 1, faster = 0) {
  const f = (x) => x.toFixed(digits)
  let ratio = ''
  if (faster) ratio = `   ${(faster / median(xs)).toFixed(1)} × faster than cold`
  else if (coldStart && unit === 'ms') ratio = `   ${(median(xs) / coldStart).toFixed(2)} of a cold start`
  console.log(`${name.padEnd(52)} p50 ${f(median(xs))}  p95 ${f(percentile(xs, 0.95))}  p99 ${f(percentile(xs, 0.99))} ${unit}  (n=${xs.length})${ratio}`)
  return median(xs)
}
async function time(f) {
  const t = performance.now()
  await f()
  return performance.now() - t
}

// A server on its own data directory, ended when the work is done.
async function serve(flags, work) {
  const dir = mkdtempSync(join(tmpdir(), 'postern-bench-'))
  const log = join(dir, 'log')
  const out = openSync(log, 'w')
  const server = spawn(postern, ['up', '--data', dir, '--listen', '127.0.0.1:3400', '--smtp', '127.0.0.1:3425', '--max-sandboxes', '400', '--snapshots', ...flags], {
    stdio: ['ignore', out, out],
  })
  const ended = new Promise((r) => server.on('exit', r))
  const kill = () => server.kill('SIGKILL')
  process.on('exit', kill)
  const said = async (text) => {
    for (let i = 0; !readFileSync(log, 'utf8').includes(text); i++) {
      if (i > 1200) throw new Error(readFileSync(log, 'utf8'))
      await sleep(100)
    }
  }
  await said('/setup.link')
  if (!flags.includes('--cold')) await said('made snapshot of template')
  process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = 'http://127.0.0.1:3400'
  process.env.E2B_API_KEY = readFileSync(join(dir, 'project.key'), 'utf8').trim()
  try {
    return await work(dir)
  } finally {
    server.kill('SIGTERM')
    await ended
    process.off('exit', kill)
    rmSync(dir, { recursive: true, force: true })
  }
}

// All processes of sandboxes are in cgroups below "postern".
function memoryMB() {
  let kb = 0
  const seen = new Set()
  for (const pid of readdirSync('/proc').filter((p) => /^\d+$/.test(p))) {
    try {
      const cgroup = readFileSync(`/proc/${pid}/cgroup`, 'utf8')
      if (!/\/postern/.test(cgroup)) continue
      // Several processes run in one address space: gVisor's stubs. They would
      // be counted once each, and are known by having all figures alike.
      const rollup = readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8')
      const space = [cgroup, readFileSync(`/proc/${pid}/statm`, 'utf8'), rollup].join()
      if (seen.has(space)) continue
      seen.add(space)
      kb += Number(rollup.match(/^Pss:\s+(\d+)/m)[1])
    } catch {
      // It has ended.
    }
  }
  return kb / 1024
}

// rest is how long to wait between two creates: the pool refills meanwhile.
async function starts(rest) {
  const echo = []
  const python = []
  for (let i = 0; i < runs; i++) {
    let s
    await sleep(rest)
    echo.push(await time(async () => {
      s = await Sandbox.create()
      await s.commands.run('echo')
    }))
    await s.kill()
  }
  for (let i = 0; i < Math.min(runs, 10); i++) {
    let s
    await sleep(rest)
    python.push(await time(async () => {
      s = await Sandbox.create()
      await s.runCode('1')
    }))
    await s.kill()
  }
  return { echo, python }
}

const cold = await serve(['--cold'], async () => {
  const { echo, python } = await starts(0)
  return { echo: report('cold start: create → first echo', echo), python: report('cold start: create → first runCode', python) }
})
coldStart = cold.echo
await serve(['--pool-max', '0', '--pool-min', '0'], async () => {
  const { echo, python } = await starts(0)
  report('from snapshot: create → first echo', echo, 'ms', 1, cold.echo)
  report('from snapshot: create → first runCode', python, 'ms', 1, cold.python)
})
await serve(['--pool-min', '2'], async () => {
  const { echo, python } = await starts(1000)
  report('from the pool: create → first echo', echo, 'ms', 1, cold.echo)
  report('from the pool: create → first runCode', python, 'ms', 1, cold.python)

  const s = await Sandbox.create()
  const run = []
  for (let i = 0; i < 200; i++) run.push(await time(() => s.commands.run('true')))
  report('commands.run("true"), a login shell', run)
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
  await s.commands.run('rm /tmp/big')

  // 256 MiB of memory that no compression and no zero page makes smaller.
  await s.runCode('import os; dirty = bytearray(os.urandom(256 << 20))')
  const pause = []
  const resume = []
  for (let i = 0; i < 7; i++) {
    await s.runCode('dirty[0] ^= 1')
    pause.push(await time(() => s.pause()))
    resume.push(await time(() => s.connect()))
  }
  report('pause, 256 MiB dirty', pause)
  report('resume, 256 MiB dirty', resume)
  await s.kill()

  await sleep(2000)
  const before = memoryMB()
  const many = []
  for (let i = 0; i < 10; i++) many.push(await Sandbox.create())
  await Promise.all(many.map((x) => x.runCode('1')))
  await sleep(12_000) // the pool has shrunk again
  console.log(`${'memory of a sandbox with its interpreter'.padEnd(52)} ${((memoryMB() - before) / many.length).toFixed(1)} MiB PSS (of 10)`)
  await Promise.all(many.map((x) => x.kill()))
})
if (density) {
  await serve(['--pool-max', '0', '--pool-min', '0'], async () => {
    const all = []
    const made = []
    for (let i = 0; i < density; i += 4) {
      await Promise.all(Array.from({ length: Math.min(4, density - i) }, async () => made.push(await time(async () => all.push(await Sandbox.create({ timeoutMs: 3600_000 }))))))
    }
    const c = report(`create, ${density} in all, four at a time`, made)
    console.log(`${'  its p95 to its p50'.padEnd(52)} ${(percentile(made, 0.95) / c).toFixed(1)}`)
    const answer = []
    for (const s of all) answer.push(await time(() => s.commands.run('true')))
    report(`a command in each of ${density}`, answer)
    console.log(`${`memory of ${density}`.padEnd(52)} ${(memoryMB() / density).toFixed(1)} MiB PSS each`)
    await Promise.all(all.map((x) => x.kill()))
  })
}
