package imapserver

import (
	"runtime"

	"postern/internal/mailbox"
	"postern/internal/seal"
)

// An ahead opens the messages of one command side by side: small ones, a few before
// they are asked for. To open one costs an exchange of keys. One goroutine uses it.
type ahead struct {
	c     *session
	k     *seal.Key
	list  []int // indexes of entries, in the order in which they are asked for
	begun int   // how many of list were looked at

	slots map[int]chan opening // what is being opened, by index
}

type opening struct {
	raw []byte
	err error
}

// raw returns an opened message, as [session.raw] does.
func (a *ahead) raw(i int) (raw []byte, done func(), err error) {
	a.fill()
	slot, ok := a.slots[i]
	if !ok {
		return a.c.raw(a.k, &a.c.view.entries[i])
	}
	o := <-slot
	delete(a.slots, i)
	a.fill()
	return o.raw, func() {}, o.err
}

// fill begins to open what comes next. Large messages wait for their turn instead.
func (a *ahead) fill() {
	for a.begun < len(a.list) && len(a.slots) < 2*runtime.GOMAXPROCS(0) {
		i := a.list[a.begun]
		a.begun++
		e := a.c.view.entries[i]
		if a.c.view.folder == mailbox.FolderDrafts || e.size > largeMessage {
			continue
		}
		slot := make(chan opening, 1)
		a.slots[i] = slot
		go func() {
			raw, _, err := a.c.raw(a.k, &e)
			slot <- opening{raw, err}
		}()
	}
}

// end wipes what was opened and not asked for.
func (a *ahead) end() {
	for _, slot := range a.slots {
		clear((<-slot).raw)
	}
}
