// Plays a careful reviewer in a real browser:
//
//   node hundred.mjs BASE_URL SETUP_LINK OUT_DIR STAGE_URL BY COUNT
//
// BY is how the reviewer works: with keys alone, with a pointer alone, on a phone by
// touch, or plain: with a pointer and without JavaScript. They decide only from what
// the page shows. STAGE_URL is a server of the Go test that lets things happen between
// the look and the click; it also knows what should have been decided, and this script
// does not. The time is printed, and nothing is expected of it.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, rest } from './kit.mjs'
import { join } from 'node:path'

const [stage, by, count] = rest
const phone = by === 'phone'
const keys = by === 'keys'
const idOf = (url) => /\/actions\/(act_[A-Z2-7]+)/.exec(url)?.[1]

// press presses something, as this reviewer does.
const press = (locator) => phone ? locator.tap() : locator.click()

// leave waits for the page that follows an act.
async function leave(page, act) {
  await Promise.all([page.waitForNavigation({ waitUntil: 'load' }), act()])
}

// judge says what a careful person makes of the page: the findings, who receives it,
// how much of it is shown, and what it says.
async function judge(page) {
  const seen = await page.evaluate(() => ({
    may: Boolean(document.querySelector('#approve')),
    findings: document.querySelector('.closely')?.innerText ?? '',
    to: [...document.querySelectorAll('.people .addr')].map((e) => e.innerText.trim()),
    text: document.querySelector('pre.text')?.innerText ?? '',
    cut: /This is the beginning of/.test(document.querySelector('main').innerText),
    voted: /You approved this/.test(document.querySelector('#bar')?.innerText ?? ''),
    asked: Boolean(document.querySelector('[popovertarget=reject-sheet]')),
    outdated: Boolean(document.querySelector('#changed:not([hidden])')),
  }))
  if (seen.voted || !seen.asked) return 'leave'
  if (seen.findings || seen.cut) return 'reject'
  if (seen.to.length !== 1 || !/@([a-z]+\.)?(partner|globex)\.example$/.test(seen.to[0])) return 'reject'
  if (!/parcel/.test(seen.text)) return 'reject'
  return seen.may ? 'approve' : 'leave'
}

async function approve(page) {
  if (!keys) return press(page.locator('#approve'))
  await page.keyboard.press('a')
  await page.keyboard.press('Enter')
}

async function reject(page) {
  if (!keys) {
    await press(page.locator('[popovertarget=reject-sheet]').first())
    await press(page.locator('label[for=why-content]'))
    return press(page.locator('#reject'))
  }
  await page.keyboard.press('r')
  await page.keyboard.type('not this')
  await page.keyboard.press('Tab')
  await page.keyboard.press('Enter')
}

async function run() {
  const context = await open({
    javaScriptEnabled: by !== 'plain',
    ...(phone ? { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 } : {}),
  })
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await leave(page, () => page.getByRole('button', { name: 'Create account' }).click())
  await page.goto(new URL('/console/review', base).href)

  const done = new Map() // what was decided, by action
  const began = performance.now()
  const figures = { approve: 0, reject: 0, leave: 0, refused: 0 }
  for (let looks = 0; looks < 4 * count && done.size < count; looks++) {
    const id = idOf(page.url())
    if (!id || done.has(id)) {
      // The next one, as the queue has it; where that was looked at, one further on.
      const next = page.locator('.detail-nav [rel=next]')
      if (id && await next.count() && idOf(await next.getAttribute('href')) && looks % 5 !== 4) {
        await leave(page, () => keys ? page.keyboard.press('j') : press(next))
        continue
      }
      await page.goto(new URL('/console/review', base).href)
      const hrefs = await page.locator('.queue-list a.row, .queue-list .row a').evaluateAll((l) => l.map((a) => a.getAttribute('href')))
      const href = hrefs.find((h) => idOf(h) && !done.has(idOf(h)))
      if (!href) break
      await page.goto(new URL(href, base).href)
      continue
    }
    let what = await judge(page)
    if (done.size === 3) await page.screenshot({ path: join(out, `${by}.png`) })
    const answer = await fetch(`${stage}/?${new URLSearchParams({ id })}`)
    if (!answer.ok) throw new Error(await answer.text())
    if (what !== 'leave') {
      await leave(page, () => what === 'approve' ? approve(page) : reject(page))
      if (idOf(page.url()) === id || await page.locator('main [role=alert]').count()) {
        // It was refused: the reviewer looks at what is there now, and decides once more.
        figures.refused++
        await page.goto(new URL(`/console/actions/${id}`, base).href)
        what = await judge(page)
        if (what === 'reject') await leave(page, () => reject(page))
        else what = 'leave'
      }
    }
    figures[what]++
    done.set(id, what)
  }
  const seconds = (performance.now() - began) / 1000
  console.log(`${by}: ${done.size} actions in ${seconds.toFixed(1)} s, ${(1000 * seconds / done.size).toFixed(0)} ms each: ${JSON.stringify(figures)}`)
  check(`the reviewer has looked at each of ${count}`, done.size === Number(count), done.size)
  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
