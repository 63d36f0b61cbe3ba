// What the scripts beside this file share: their figures in the format of Go's benchmarks,
// one line each, which test/bench reads, and the end of a server. People read the other lines.
import { readFileSync } from 'node:fs'

const lines = []

// figure notes what a benchmark measured, of n times. Its name is made of the text for
// people.
export function figure(group, text, n, value, unit) {
  const name = text.trim().replace(/[^A-Za-z0-9]+/g, '-').replace(/^-|-$/g, '')
  lines.push(`Benchmark${group}/${name} ${n} ${Number(value.toPrecision(6))} ${unit}`)
}

// printFigures writes them all. It comes last: what is read below was measured to the end.
export function printFigures() {
  console.log(`\n${lines.join('\n')}`)
}

// An interrupted script runs what it has for its exit.
for (const [signal, number] of [['SIGINT', 2], ['SIGTERM', 15]]) process.on(signal, () => process.exit(128 + number))

// stop ends a server while this process exits, and waits for it. Not SIGKILL at once: a killed
// server leaves its sandboxes to the next start on its data directory, and here there is none.
export function stop(server) {
  if (server.exitCode !== null || server.signalCode !== null) return
  const runs = () => {
    try {
      return !/\) Z /.test(readFileSync(`/proc/${server.pid}/stat`, 'utf8'))
    } catch {
      return false
    }
  }
  server.kill('SIGTERM')
  for (let i = 0; i < 300 && runs(); i++) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 100)
  server.kill('SIGKILL')
}
