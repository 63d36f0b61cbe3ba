// Runs a user's session before and after a restart of the server, for the restart
// tests: node restart.mjs begin | check ID. It prints one line of JSON.
import { Sandbox } from '@e2b/code-interpreter'

const [phase, id] = process.argv.slice(2)
const say = (o) => console.log(JSON.stringify(o))

// Continuously tries an allowed and a forbidden address, and reports the results.
const attacker = `
import socket, time
out = open('/home/user/attempts', 'a', buffering=1)
while True:
    for host in ('203.0.113.10', '203.0.113.11'):
        try:
            with socket.create_connection((host, 80), timeout=2) as c:
                c.settimeout(2)
                out.write(host + ' ' + c.recv(100).decode() + '\\n')
        except Exception as e:
            out.write(host + ' ' + type(e).__name__ + '\\n')
    time.sleep(0.05)
`
// The first loop uses only builtins of the shell, and starts no programs.
const counter = 'exec 9<> <(:); (while :; do read -t 0.05 -u 9; echo $EPOCHREALTIME >>/home/user/beats; done) & i=0; while :; do i=$((i+1)); echo $i >/home/user/count.new; mv /home/user/count.new /home/user/count; echo $EPOCHREALTIME >>/home/user/starts; sleep 0.05; done'

if (phase === 'begin') {
  const s = await Sandbox.create({ timeoutMs: 600_000, network: { allowOut: ['203.0.113.10'], denyOut: ['0.0.0.0/0'] } })
  await s.runCode('x = 41')
  await s.files.write('/home/user/attacker.py', attacker)
  const a = await s.commands.run(counter, { background: true, timeoutMs: 0 })
  const b = await s.commands.run('python3 /home/user/attacker.py', { background: true, timeoutMs: 0 })
  say({ id: s.sandboxId, pids: [a.pid, b.pid] })
} else {
  const s = await Sandbox.connect(id)
  const { text } = await s.runCode('x + 1')
  const read = async () => Number(await s.files.read('/home/user/count'))
  const first = await read()
  let second = first
  for (const end = Date.now() + 60_000; second === first && Date.now() < end; second = await read()) await new Promise((done) => setTimeout(done, 300))
  const attempts = await s.files.read('/home/user/attempts')
  const times = async (name) => (await s.files.read('/home/user/' + name)).trim().split('\n').map(Number)
  const beats = await times('beats')
  const starts = await times('starts')
  const running = await s.commands.list()
  say({ text, first, second, attempts: attempts.trim().split('\n'), beats, starts, pids: running.map((p) => p.pid) })
}
process.exit(0)
