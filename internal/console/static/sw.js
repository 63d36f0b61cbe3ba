// Shows push messages. It handles no requests and stores nothing, so that no page
// outlives the session, and it knows no way to decide: a message is shown, and a click
// opens a page of the console, which asks for a sign-in and for a decision.
'use strict'

// The attack: a message that leads to another page than an action of this console.
const place = (url) => /^\/console\/(actions\/act_[A-Z2-7]{26}|review)$/.test(url) ? url : '/console/review'

self.addEventListener('push', (event) => {
  let m = {}
  try {
    m = event.data.json() || {}
  } catch {
    // A message that cannot be read still says that something waits.
  }
  const text = (s, otherwise) => typeof s === 'string' && s !== '' ? s.slice(0, 2000) : otherwise
  event.waitUntil(self.registration.showNotification(text(m.title, 'Postern'), {
    body: text(m.body, 'Something waits for you'),
    tag: text(m.tag, 'postern'),
    icon: '/console/static/icon-192.png',
    data: { url: place(m.url) },
    // No actions: a button here would decide without a sign-in.
  }))
})

self.addEventListener('notificationclick', (event) => {
  event.notification.close()
  const url = place(event.notification.data && event.notification.data.url)
  event.waitUntil((async () => {
    // A page on which somebody is deciding is not taken away from them.
    for (const c of await self.clients.matchAll({ type: 'window' })) {
      if (new URL(c.url).pathname === url) return c.focus()
    }
    return self.clients.openWindow(url)
  })())
})
