// Checks the signatures of one message with mailauth: {raw, dns} as JSON on
// standard input, where dns is the host:port of the server to ask.
import { Resolver } from 'node:dns/promises'
import { text } from 'node:stream/consumers'
import { dkimVerify } from 'mailauth/lib/dkim/verify.js'

const { raw, dns } = JSON.parse(await text(process.stdin))
const resolver = new Resolver()
resolver.setServers([dns])
const { results } = await dkimVerify(Buffer.from(raw), { resolver: (name, type) => resolver.resolve(name, type) })
console.log(JSON.stringify(results.map((r) => `${r.status.result} ${r.algo} ${r.signingDomain}`).toSorted()))
