package connector

import (
	"slices"
	"strings"

	"postern/internal/mailbox"
)

// A view is a state in the form in which it is compared and stored: the place, then
// labels, among them read and starred.
type view struct {
	place  Place
	labels []string // sorted, each once; without those that follow from the place
}

// viewOf returns the view of what a provider says.
func viewOf(s State) view {
	v := view{place: s.Place}
	if s.Read {
		v.labels = append(v.labels, mailbox.LabelRead)
	}
	if s.Starred {
		v.labels = append(v.labels, mailbox.LabelStarred)
	}
	for _, l := range s.Labels {
		// The attack: a provider names a folder like a label that means something here.
		if mailbox.OwnLabel(l) && len(v.labels) < maxSeenLabels {
			v.labels = append(v.labels, l)
		}
	}
	slices.Sort(v.labels)
	v.labels = slices.Compact(v.labels)
	return v
}

// maxSeenLabels bounds the labels of one message that are remembered.
const maxSeenLabels = 40

func (v view) String() string {
	return strings.Join(append([]string{string(v.place)}, v.labels...), " ")
}

func parseView(s string) view {
	f := strings.Fields(s)
	if len(f) == 0 {
		return view{place: Ignored}
	}
	return view{place: Place(f[0]), labels: f[1:]}
}

// ranks say which place counts where a provider has copies of one message at several.
var ranks = []Place{Inbox, Archive, Sent, Trash, Ignored}

// together returns the view of a message of which the provider has copies.
func together(copies []view) view {
	if len(copies) == 0 {
		return view{place: Ignored}
	}
	out := view{place: Ignored}
	for _, c := range copies {
		if slices.Index(ranks, c.place) < slices.Index(ranks, out.place) {
			out.place = c.place
		}
		out.labels = append(out.labels, c.labels...)
	}
	slices.Sort(out.labels)
	out.labels = slices.Compact(out.labels)
	return out
}

// all returns the labels that a message has here, sorted.
func (v view) all() []string {
	out := slices.Clone(v.labels)
	switch v.place {
	case Archive:
		out = append(out, mailbox.LabelArchived)
	case Trash:
		out = append(out, mailbox.LabelTrash)
	case Inbox, Sent, Ignored:
	}
	slices.Sort(out)
	return out
}

// difference returns what a has and b has not.
func difference(a, b []string) (out []string) {
	for _, l := range a {
		if !slices.Contains(b, l) {
			out = append(out, l)
		}
	}
	return out
}

// wants returns the modification that makes a message of view there, at the provider,
// what its labels are here; ok is false if that is so already.
func wants(here []string, there view) (m Modification, ok bool) {
	add, remove := difference(here, there.all()), difference(there.all(), here)
	has := func(l string) bool { return slices.Contains(here, l) }
	yes, no := true, false
	for _, l := range add {
		switch l {
		case mailbox.LabelRead:
			m.Read = &yes
		case mailbox.LabelStarred:
			m.Starred = &yes
		case mailbox.LabelTrash:
			m.Move = Trash
		case mailbox.LabelArchived:
			// What is in the trash, or was sent, has no place in the archive.
			if !has(mailbox.LabelTrash) && there.place != Sent {
				m.Move = Archive
			}
		default:
			m.Add = append(m.Add, l)
		}
	}
	for _, l := range remove {
		switch l {
		case mailbox.LabelRead:
			m.Read = &no
		case mailbox.LabelStarred:
			m.Starred = &no
		case mailbox.LabelTrash:
			if m.Move = Inbox; has(mailbox.LabelArchived) {
				m.Move = Archive
			}
		case mailbox.LabelArchived:
			if m.Move == "" {
				m.Move = Inbox
			}
		default:
			m.Remove = append(m.Remove, l)
		}
	}
	return m, m.Read != nil || m.Starred != nil || m.Move != "" || len(m.Add)+len(m.Remove) > 0
}

// after returns the view that a copy has once m was applied to it.
func (v view) after(m Modification) view {
	out := view{place: v.place, labels: slices.Clone(v.labels)}
	set := func(l string, on bool) {
		if i := slices.Index(out.labels, l); i >= 0 && !on {
			out.labels = slices.Delete(out.labels, i, i+1)
		} else if i < 0 && on {
			out.labels = append(out.labels, l)
		}
	}
	if m.Read != nil {
		set(mailbox.LabelRead, *m.Read)
	}
	if m.Starred != nil {
		set(mailbox.LabelStarred, *m.Starred)
	}
	for _, l := range m.Add {
		set(l, true)
	}
	for _, l := range m.Remove {
		set(l, false)
	}
	if m.Move != "" {
		out.place = m.Move
	}
	slices.Sort(out.labels)
	return out
}
