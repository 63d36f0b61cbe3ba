// What a user of the official SDK does whose E2B_DOMAIN is a Postern's: nothing
// else is set but the key and the authority that is trusted. Prints one line of
// JSON with what it saw.
import { createRequire } from 'node:module'

const require = createRequire(new URL('../../demo/package.json', import.meta.url))
const { Sandbox } = require('@e2b/code-interpreter')
const saw = {}
const s = await Sandbox.create()
saw.domain = s.sandboxDomain
saw.run = (await s.commands.run('echo hello')).stdout.trim()
await s.files.write('/home/user/site/index.html', '<h1>from inside</h1>')
saw.code = (await s.runCode('6*7')).text
const url = await s.downloadUrl('/home/user/site/index.html')
saw.download = new URL(url).protocol + ' ' + (await (await fetch(url)).text())

await s.commands.run('cd /home/user/site && exec python3 -m http.server 3000 --bind 0.0.0.0', { background: true, timeoutMs: 0 })
const host = s.getHost(3000)
const token = { 'e2b-traffic-access-token': s.trafficAccessToken }
for (let i = 0; i < 600; i++) {
  const r = await fetch(`https://${host}/`, { headers: token })
  saw.page = `${r.status} ${(await r.text()).trim()}`
  if (r.status === 200) break
  await new Promise((r) => setTimeout(r, 100))
}
saw.stranger = (await fetch(`https://${host}/`)).status
saw.closed = (await (await fetch(`https://${s.getHost(4000)}/`, { headers: token })).json()).message
saw.plain = await fetch(`http://${host}:${process.env.PLAIN_PORT}/a?b=c`, { redirect: 'manual' }).then((r) => `${r.status} ${r.headers.get('location')}`.replace(host, 'HOST'))
saw.inTheClear = await fetch(`http://api.${process.env.E2B_DOMAIN}:${process.env.PLAIN_PORT}/v2/sandboxes`, { headers: { 'X-API-KEY': process.env.E2B_API_KEY } }).then((r) => r.status)
saw.strict = await fetch(`https://api.${process.env.E2B_DOMAIN}/console/`, { redirect: 'manual' }).then((r) => r.headers.get('strict-transport-security'))
saw.strictInside = await fetch(`https://${host}/`, { headers: token }).then((r) => r.headers.get('strict-transport-security'))
await s.kill()
saw.killed = (await (await fetch(`https://${host}/`, { headers: token })).json()).message
console.log(JSON.stringify(saw))
