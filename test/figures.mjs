// The figures of the scripts beside this file, in the format of Go's benchmarks: one line
// each, which test/bench reads. People read the other lines.
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
