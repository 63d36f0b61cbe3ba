// Tests the management of mail in a real browser without JavaScript:
//
//   node mail.mjs BASE_URL SETUP_LINK OUT_DIR PUBLISH_URL
//
// The test creates the console's first account, adds a domain, publishes the DNS
// records that the page shows by posting them to PUBLISH_URL as JSON, and checks the
// domain. It creates an inbox in the domain with a recovery key, recovers it, changes
// it, deletes it and restores it. It saves screenshots of every page, wide and
// narrow, light and dark, in OUT_DIR. It prints a line for each check and exits with
// status 0 if all passed.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, pictures, rest, tabTo } from './kit.mjs'
import { join } from 'node:path'

const publish = rest[0]

// records reads the DNS records to publish from a domain's page, as a person copies them.
async function records(page) {
  const out = []
  for (const card of await page.locator('article.card').all()) {
    const [name, value] = await card.locator('code.copy').allInnerTexts()
    const type = (await card.locator('dd').first().innerText()).split(',')[0]
    const optional = await card.getByText('optional', { exact: true }).count() > 0
    if (!optional) out.push({ type, name, value })
  }
  return out
}

const result = (page, title) => page.locator('article.card', { hasText: title }).locator('.top .tag').first().innerText()

async function run() {
  const context = await open()
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account' }).click()
  const state = await context.storageState()
  const go = (path) => page.goto(new URL(path, base).href)

  await pictures([['inboxes-none', '/console/inboxes'], ['domains-none', '/console/domains'], ['recover', '/console/recover']], state)

  // A domain.
  await go('/console/domains')
  await fill(page, { Domain: 'co.uk' })
  await page.getByRole('button', { name: 'Add domain' }).click()
  check('a public suffix is refused with an error text', /public suffix/.test(await page.getByRole('alert').innerText()))
  await fill(page, { Domain: 'Bücher.example' })
  await page.getByRole('button', { name: 'Add domain' }).click()
  const domain = new URL(page.url()).pathname
  check('adding a domain opens its page', domain.startsWith('/console/domains/dom_'), domain)
  check('the page shows the domain in ASCII and in Unicode', (await page.locator('main').innerText()).includes('xn--bcher-kva.example') && (await page.locator('main').innerText()).includes('bücher.example'))
  check('a new domain is pending', (await page.locator('#standing .tag').innerText()) === 'pending')
  const wanted = await records(page)
  check('the page shows the proof, MX, SPF and DMARC records to publish', ['_postern.', '_dmarc.'].every((p) => wanted.some((r) => r.name.startsWith(p))) && wanted.some((r) => r.type === 'MX') && wanted.some((r) => r.value.startsWith('v=spf1')), JSON.stringify(wanted))
  // For the clipboard.
  await page.locator('code.copy').nth(1).click()
  const selected = await page.evaluate(() => getSelection().toString())
  check('one click selects a whole value', selected === wanted[0].value, selected)
  await pictures([['domain-pending', domain]], state)

  const look = async () => {
    await go(domain)
    for (let i = 0; i < 40; i++) { // the server looks at most every few seconds
      await page.getByRole('button', { name: 'Check DNS now' }).click()
      if (await page.getByRole('alert').count() === 0) return
      await page.waitForTimeout(1500)
      await go(domain)
    }
  }
  await look()
  check('the proof is missing before it is published', (await result(page, 'Proof of ownership')) === 'missing')
  await pictures([['domain-missing', domain]], state)

  const send = async (list) => {
    const r = await fetch(publish, { method: 'POST', body: JSON.stringify(list) })
    if (!r.ok) throw new Error(`publish: ${r.status} ${await r.text()}`)
  }
  await send([wanted[0], { type: 'MX', name: 'xn--bcher-kva.example', value: 'mail.elsewhere.example' }, { type: 'TXT', name: '_dmarc.xn--bcher-kva.example', value: '"><script>alert(1)</script>' }])
  await look()
  check('a domain with only the proof is degraded', (await page.locator('#standing .tag').innerText()) === 'degraded')
  check('the page warns that mail goes to other servers', /goes to other servers/.test(await page.locator('main').innerText()))
  await pictures([['domain-degraded', domain]], state)
  await send(wanted)
  await look()
  check('a domain with all records is verified', (await page.locator('#standing .tag').innerText()) === 'verified', await page.locator('main').innerText())
  await pictures([['domain-verified', domain], ['domains', '/console/domains']], state)

  // An inbox in it.
  await go('/console/inboxes')
  await fill(page, { Name: 'mailer-daemon' })
  await page.getByRole('button', { name: 'Create inbox' }).click()
  check('a reserved name is refused with an error text', /reserved/.test(await page.getByRole('alert').innerText()))
  await fill(page, { Name: 'sales', 'Display name': 'The sales desk', 'Expires on': '2999-12-31' })
  await page.getByLabel('Domain', { exact: true }).selectOption('xn--bcher-kva.example')
  await page.getByLabel('Create a recovery key').check()
  await page.getByRole('button', { name: 'Create inbox' }).click()
  const key = await page.locator('#key').innerText()
  const recovery = await page.locator('#recovery-key').innerText()
  check('a new inbox\'s key and recovery key are shown', /^pib_[A-Z2-7]{26}$/.test(key) && /^prk_[A-Z2-7]{26}$/.test(recovery), key.slice(0, 4) + recovery.slice(0, 4))
  check('the page explains what losing the keys means', /the mail is lost/.test(await page.locator('main').innerText()))
  for (const v of [{ width: 1280, height: 900 }, { width: 390, height: 844 }]) {
    await page.setViewportSize(v)
    await page.screenshot({ path: join(out, `key-${v.width}.png`), fullPage: true })
  }
  await page.setViewportSize({ width: 1280, height: 900 })
  await page.getByRole('link', { name: /I have copied the key/ }).click()
  const inbox = new URL(page.url()).pathname
  check('the inbox\'s page does not contain its keys', inbox.startsWith('/console/inboxes/ibx_') && !(await page.content()).includes(key) && !(await page.content()).includes(recovery))
  await pictures([['inbox', inbox], ['inboxes-some', '/console/inboxes']], state)

  // Somebody sends the agent a prompt injection.
  await go('/console/quarantine')
  check('the quarantine is empty at first', /Quarantine is empty/.test(await page.locator('main').innerText()))
  const attack = () => fetch(`${publish}/attack?to=sales@xn--bcher-kva.example`, { method: 'POST' })
  const sent = await attack()
  check('the server accepts the suspicious mail', sent.ok, sent.ok || await sent.text())
  await attack()
  await go('/console/review')
  check('the queue shows the number of held messages', await page.getByText('2 incoming messages are held').isVisible())
  await go('/console/quarantine')
  const held = page.locator('.queue-list a.row')
  const chosen = page.locator('article.detail')
  check('the quarantine shows the findings but no content', await held.count() === 2 && /ignore its instructions/.test(await chosen.innerText()) && !/Kohlrabi|evil\.example/.test(await page.content()))
  await pictures([['quarantine', '/console/quarantine'], ['queue-held', '/console/review'], ['sending', '/console/sending']], state)
  await chosen.getByRole('button', { name: 'Release to inbox' }).click()
  check('a released message leaves the quarantine', await held.count() === 1)
  await chosen.getByRole('button', { name: 'Delete permanently' }).click()
  check('a deleted message leaves the quarantine', /Quarantine is empty/.test(await page.locator('main').innerText()))
  await go('/console/sending')
  await fill(page, { Address: 'bob@example.com' })
  await page.getByRole('button', { name: 'Look up' }).click()
  await page.getByRole('button', { name: 'Add to the list' }).click()
  await fill(page, { Address: 'bob@example.com' })
  await page.getByRole('button', { name: 'Look up' }).click()
  check('an address is added to the suppression list and found there', /has been on the list since/.test(await page.locator('#lookup').innerText()))
  await page.setViewportSize({ width: 1280, height: 900 })
  await page.screenshot({ path: join(out, 'sending-lookup.png'), fullPage: true })

  // The key is lost.
  await go('/console/recover')
  await fill(page, { 'Recovery key': key })
  await page.getByRole('button', { name: 'Create new key' }).click()
  check('a wrong key cannot recover the inbox', /not the recovery key/.test(await page.getByRole('alert').innerText()))
  await fill(page, { 'Recovery key': recovery })
  await page.getByLabel('A key was stolen: revoke all other keys and grants').check()
  await page.getByRole('button', { name: 'Create new key' }).click()
  const fresh = await page.locator('#key').innerText()
  check('the recovery key creates a new inbox key', /^pib_/.test(fresh) && fresh !== key)

  // With the keyboard alone: revoking the last key needs a confirmation.
  await go(inbox)
  const row = page.locator('tr', { hasText: 'read, draft, propose, manage' })
  check('recovery revokes the other keys', await row.count() === 1, await row.count())
  await row.getByRole('button').click()
  check('revoking the last key needs a confirmation', /the last key/.test(await page.getByRole('alert').innerText()))
  await pictures([['inbox-recovered', inbox]], state)

  await go(inbox)
  await fill(page, { 'Display name': 'Sales', 'Storage limit in MiB': '20' })
  await page.getByRole('button', { name: 'Save' }).click()
  check('changed settings are saved', /of 20 MiB/.test(await page.locator('main').innerText()))
  check('the settings can be reached with the keyboard', await tabTo(page, 'megabytes') > 0)

  await page.getByRole('button', { name: 'Delete inbox' }).click()
  check('deleting asks again before anything is sent', await page.getByRole('dialog').isVisible())
  await page.getByRole('button', { name: 'Delete it' }).click()
  check('a deleted inbox can be restored', await page.getByRole('button', { name: 'Restore inbox' }).isVisible())
  await pictures([['inbox-deleted', inbox], ['inboxes-deleted', '/console/inboxes']], state)
  await page.getByRole('button', { name: 'Restore inbox' }).click()
  check('a restored inbox can be deleted again', await page.getByRole('button', { name: 'Delete inbox' }).isVisible())

  await go(domain)
  await fill(page, { 'Enter the domain name to confirm': 'bücher.example' })
  await page.getByRole('button', { name: 'Remove domain' }).click()
  check('a domain with an inbox cannot be removed', /inboxes have addresses/.test(await page.getByRole('alert').innerText()))

  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
