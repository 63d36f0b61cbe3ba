package preview

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// The limits of a calendar file.
const (
	maxCalendar = 1 << 20 // bytes
	maxLines    = 20_000  // after unfolding
	maxNesting  = 8       // components within each other
	maxEvents   = 10      // events that are shown
	maxPeople   = 40      // attendees of one event that are shown
)

// Dates is the content of a calendar file.
type Dates struct {
	Method string // REQUEST, CANCEL, REPLY, PUBLISH …; empty if it names none
	Means  string // what calendar programs do with it, for people
	Events []Event
}

// An Event is one entry of a calendar. All text is hostile.
type Event struct {
	Kind        string // "event", "task", "note" or "busy times"
	Summary     string
	Start, End  string // with the time zone that the file names
	Every       string // the rule of repetition; empty if it does not repeat
	Where       string
	Description string
	Organizer   Attendee
	Attendees   []Attendee
	Others      int      // number of attendees who are not in Attendees
	Status      string   // such as "confirmed"; may be empty
	Links       []string // URLs
	Alarms      []string // what alarms do: "shows a reminder"
}

// An Attendee is an organizer or attendee of an event. Its texts are hostile.
type Attendee struct {
	Name    string // chosen by the sender; may be empty
	Address string // user@domain if it is a mailbox; else a URI
	Role    string // "optional", "required" …; may be empty
}

// A property is one line of a calendar (RFC 5545, section 3.1).
type property struct {
	name, value string
	params      map[string]string
}

// calendar shows a calendar file.
func (f *File) calendar(text string) {
	if len(text) > maxCalendar {
		f.missing("the calendar is larger than %d MiB, so nothing of it is shown", maxCalendar>>20)
		return
	}
	r := calendarReader{}
	why := r.read(text)
	if len(r.dates.Events) == 0 && why == "" {
		why = "it has no entry"
	}
	if why != "" {
		f.note("it is not a well-formed calendar, so it is shown as text: %s", why)
		f.text(text)
		return
	}
	// The attack: words in a property, a parameter or a time zone that no field shows, in a
	// file that counts as shown in full. So the text is shown too.
	f.text(text)
	f.Form, f.Events = Calendar, r.dates
	f.Events.Means = methodMeans(r.dates.Method)
	f.Facts = plural(r.events, "entry", "entries")
	if r.events > len(r.dates.Events) {
		f.missing("entries 1 to %d of %d", len(r.dates.Events), r.events)
	}
	if r.left > 0 {
		f.note("only its text shows %s of it", plural(r.left, "line", "lines"))
	}
	for _, name := range r.twice {
		// The attack: the reviewer reads the last title, and the recipient's calendar shows the first.
		f.note("an entry has %s more than once, and calendar programs differ in which one they use", name)
	}
	for _, e := range r.dates.Events {
		if e.Others > 0 {
			f.missing("%s of one entry are not listed", plural(e.Others, "attendee", "attendees"))
		}
	}
}

// methodMeans says what calendar programs do with a file of this method (RFC 5546).
func methodMeans(method string) string {
	switch method {
	case "REQUEST":
		return "invites the attendees, or changes an earlier invitation"
	case "CANCEL":
		return "removes the entry from the attendees’ calendars"
	case "REPLY":
		return "tells the organizer whether somebody comes"
	case "COUNTER":
		return "proposes another time to the organizer"
	case "ADD":
		return "adds a date to an entry that repeats"
	case "", "PUBLISH":
		return "is added to a calendar; nobody is invited"
	}
	return "has a method that few calendar programs know"
}

// A calendarReader reads the lines of a calendar.
type calendarReader struct {
	dates  Dates
	open   []string // components around the line, the innermost last
	events int      // entries in all
	left   int      // lines of entries that are not shown
	twice  []string // properties of an entry that differ from one before
	alarm  string   // action of the alarm around the line
}

// read reads a calendar. It returns why it cannot, or "".
func (r *calendarReader) read(text string) string {
	lines := unfold(text)
	if len(lines) > maxLines {
		return "it has too many lines"
	}
	for n, line := range lines {
		if line == "" {
			continue
		}
		p, ok := parseProperty(line)
		if !ok {
			return fmt.Sprintf("line %d has no name and value", n+1)
		}
		switch p.name {
		case "BEGIN":
			if len(r.open) >= maxNesting {
				return "its components are too deep"
			}
			if len(r.open) == 0 && !strings.EqualFold(p.value, "VCALENDAR") {
				return "it does not begin with BEGIN:VCALENDAR"
			}
			r.open = append(r.open, strings.ToUpper(p.value))
			r.begin()
		case "END":
			if len(r.open) == 0 || !strings.EqualFold(p.value, r.open[len(r.open)-1]) {
				return fmt.Sprintf("line %d ends what did not begin", n+1)
			}
			r.end()
			r.open = r.open[:len(r.open)-1]
		default:
			if len(r.open) == 0 {
				return "it has lines outside of a calendar"
			}
			r.line(p)
		}
	}
	if len(r.open) > 0 {
		return "it ends too early"
	}
	return ""
}

// unfold returns the lines of a calendar, with folded lines joined.
func unfold(text string) []string {
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	// A word cut in two lines is one word to a calendar.
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\n ", ""), "\n\t", "")
	return strings.Split(text, "\n")
}

// parseProperty reads one line. A colon or semicolon within quotation marks belongs to
// a parameter's value.
func parseProperty(line string) (p property, ok bool) {
	p.params = map[string]string{}
	quoted, from, name := false, 0, ""
	put := func(piece string) {
		if name == "" {
			name = piece
			p.name = strings.ToUpper(strings.TrimSpace(piece))
			return
		}
		key, value, _ := strings.Cut(piece, "=")
		p.params[strings.ToUpper(key)] = strings.Trim(value, `"`)
	}
	for i := range len(line) {
		switch c := line[i]; {
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == ';':
			put(line[from:i])
			from = i + 1
		case c == ':':
			put(line[from:i])
			p.value = line[i+1:]
			return p, p.name != ""
		}
	}
	return property{}, false
}

// begin opens an entry.
func (r *calendarReader) begin() {
	var kind string
	switch r.open[len(r.open)-1] {
	case "VEVENT":
		kind = "event"
	case "VTODO":
		kind = "task"
	case "VJOURNAL":
		kind = "note"
	case "VFREEBUSY":
		kind = "busy times"
	case "VALARM":
		r.alarm = "DISPLAY"
		return
	default:
		return
	}
	if r.events++; r.events <= maxEvents {
		r.dates.Events = append(r.dates.Events, Event{Kind: kind})
	}
}

func (r *calendarReader) end() {
	if r.open[len(r.open)-1] != "VALARM" {
		return
	}
	if e := r.event(); e != nil && len(e.Alarms) < 10 {
		e.Alarms = append(e.Alarms, alarmMeans(r.alarm))
	}
}

func alarmMeans(action string) string {
	switch action {
	case "DISPLAY":
		return "shows a reminder"
	case "AUDIO":
		return "plays a sound"
	case "EMAIL":
		return "sends an email without asking"
	case "PROCEDURE":
		return "runs a program"
	}
	return "does something by itself: " + action
}

// event returns the entry around the line, or nil if it is not shown.
func (r *calendarReader) event() *Event {
	if r.events == 0 || r.events > maxEvents || len(r.open) < 2 {
		return nil
	}
	switch r.open[1] {
	case "VEVENT", "VTODO", "VJOURNAL", "VFREEBUSY":
		return &r.dates.Events[r.events-1]
	}
	return nil
}

// line takes one property.
func (r *calendarReader) line(p property) {
	if len(r.open) == 1 && p.name == "METHOD" {
		r.dates.Method = strings.ToUpper(strings.TrimSpace(p.value))
		return
	}
	e := r.event()
	switch {
	case len(r.open) > 1 && e == nil && r.open[1] != "VTIMEZONE":
		r.left++
		return
	case e == nil:
		return
	case len(r.open) > 2:
		switch p.name {
		case "ACTION":
			r.alarm = strings.ToUpper(strings.TrimSpace(p.value))
		case "ATTENDEE":
			e.attend(person(p)) // whom an alarm's mail goes to
		}
		return
	}
	text := unescapeText(p.value)
	switch p.name {
	case "SUMMARY":
		r.put(p.name, &e.Summary, text)
	case "LOCATION":
		r.put(p.name, &e.Where, text)
	case "DESCRIPTION", "COMMENT":
		e.Description = strings.TrimSpace(e.Description + "\n" + text)
	case "STATUS":
		r.put(p.name, &e.Status, strings.ToLower(text))
	case "DTSTART":
		r.put(p.name, &e.Start, moment(p))
	case "DTEND", "DUE":
		r.put(p.name, &e.End, moment(p))
	case "DURATION":
		r.put(p.name, &e.End, "after "+p.value)
	case "RRULE", "RDATE":
		e.Every = strings.TrimSpace(e.Every + " " + p.value)
	case "ORGANIZER":
		r.put(p.name, &e.Organizer.Address, person(p).Address)
		e.Organizer = person(p)
	case "ATTENDEE":
		e.attend(person(p))
	case "URL", "ATTACH", "CONFERENCE", "IMAGE":
		if p.params["VALUE"] == "BINARY" || len(p.value) > 2000 {
			r.left++ // a file within the calendar
		} else if len(e.Links) < 20 {
			e.Links = append(e.Links, p.value)
		} else {
			r.left++
		}
	case "UID", "DTSTAMP", "CREATED", "LAST-MODIFIED", "SEQUENCE", "PRIORITY", "TRANSP", "CLASS", "CATEGORIES", "RECURRENCE-ID", "GEO":
	default:
		r.left++
	}
}

// put sets a property that an entry may have once. It notes a second, different value.
func (r *calendarReader) put(name string, to *string, value string) {
	if *to != "" && *to != value && !slices.Contains(r.twice, name) {
		r.twice = append(r.twice, name)
	}
	*to = value
}

func (e *Event) attend(a Attendee) {
	if len(e.Attendees) < maxPeople {
		e.Attendees = append(e.Attendees, a)
	} else {
		e.Others++
	}
}

// person returns the person of an ORGANIZER or ATTENDEE.
func person(p property) Attendee {
	a := Attendee{Name: p.params["CN"], Address: p.value}
	if len(a.Address) > 7 && strings.EqualFold(a.Address[:7], "mailto:") {
		a.Address = a.Address[7:]
	}
	switch strings.ToUpper(p.params["ROLE"]) {
	case "CHAIR":
		a.Role = "chair"
	case "OPT-PARTICIPANT":
		a.Role = "optional"
	case "NON-PARTICIPANT":
		a.Role = "for information"
	}
	return a
}

// moment returns a date, or a date and time (RFC 5545, sections 3.3.4 and 3.3.5), in a form
// for people. It returns other values unchanged.
func moment(p property) string {
	v := strings.TrimSpace(p.value)
	if t, err := time.Parse("20060102", v); err == nil {
		return t.Format("2006-01-02") + ", all day"
	}
	if t, err := time.Parse("20060102T150405Z", v); err == nil {
		return t.Format("2006-01-02 15:04 UTC")
	}
	if t, err := time.Parse("20060102T150405", v); err == nil {
		if zone := p.params["TZID"]; zone != "" {
			return t.Format("2006-01-02 15:04") + " in " + zone
		}
		return t.Format("2006-01-02 15:04") + ", in the reader’s time zone"
	}
	return v
}

// unescapeText undoes the escapes of a text (RFC 5545, section 3.3.11).
func unescapeText(s string) string {
	return strings.NewReplacer(`\\`, `\`, `\n`, "\n", `\N`, "\n", `\,`, ",", `\;`, ";").Replace(s)
}
