package notify

import "postern/internal/semaphore"

// Limits of concurrent sends. The attack: somebody sets up rooms or browsers at servers
// that answer slowly or never, and the notices of everybody else wait behind theirs.
const (
	maxTelegram  = 4                      // all messages go to one server, which limits how many it takes
	maxChannel   = 160                    // over any other channel
	maxOfProject = maxRooms * maxToHolder // of one project over one channel
	maxToHolder  = 2                      // to one person or room over one channel
	maxDue       = 20                     // notices of one person or room that one pass looks at
)

// places limits how many sends run at once. A send takes a place of its channel, of its
// project and of the person or room that it goes to. If there is no place, the send does
// not wait: the next pass tries again.
type places struct {
	channel, project, holder *semaphore.PerKey
	telegram                 *semaphore.PerKey
}

func newPlaces() places {
	return places{
		channel: semaphore.NewPerKey(maxChannel), project: semaphore.NewPerKey(maxOfProject), holder: semaphore.NewPerKey(maxToHolder),
		telegram: semaphore.NewPerKey(maxTelegram),
	}
}

// take takes the places of one send. The caller must call release when the send is done.
func (p places) take(c Channel, project, holder string) (release func(), ok bool) {
	whole := p.channel
	if c == Telegram {
		whole = p.telegram
	}
	var taken []func()
	release = func() {
		for _, f := range taken {
			f()
		}
	}
	for _, s := range []struct {
		places *semaphore.PerKey
		key    string
	}{{p.holder, string(c) + " " + holder}, {p.project, string(c) + " " + project}, {whole, string(c)}} {
		f, ok := s.places.TryAcquire(s.key)
		if !ok {
			release()
			return nil, false
		}
		taken = append(taken, f)
	}
	return release, true
}
