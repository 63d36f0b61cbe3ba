package console

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"sync"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/store"
)

// A heldMessage is a message in quarantine, with the address of its inbox.
type heldMessage struct {
	mailbox.Held
	Address string
	Sender  mailbox.Sender // of a message that the viewer may see
	Seen    bool           // Sender is known
}

// Percent returns the score in percent.
func (h heldMessage) Percent() int { return int(h.Score*100 + 0.5) }

// Because says why the message is held.
func (h heldMessage) Because() string {
	switch {
	case h.Reason != message.ForPolicy:
		return fmt.Sprintf("attack score %d of 100", h.Percent())
	case h.Checks["dmarc"] == "permerror": // there is no domain that asks for anything
		return "the From field does not name exactly one sender, so the sender cannot be verified"
	default:
		return "the sender failed authentication, and the DMARC policy of its domain requests quarantine"
	}
}

// A found is a category that a scan found, with its weight.
type found struct {
	Words   string
	Percent int
}

// Found returns the categories that the scan found, the one with most weight first.
func (h heldMessage) Found() (out []found) {
	cs := slices.SortedFunc(maps.Keys(h.Categories), func(a, b scan.Category) int {
		if d := h.Categories[b] - h.Categories[a]; d > 0 {
			return 1
		} else if d < 0 {
			return -1
		}
		return 0
	})
	for _, c := range cs {
		out = append(out, found{or(categoryNames[c], string(c)), int(h.Categories[c]*100 + 0.5)})
	}
	return out
}

// categoryNames describes the categories that a scan finds.
var categoryNames = map[scan.Category]string{
	"instruction_override": "tells the agent to ignore its instructions", "role_impersonation": "impersonates the system or the operator",
	"hidden_text": "contains hidden text", "exfiltration": "asks for secrets or data",
	"tool_abuse": "asks to run commands or tools", "obfuscation": "disguises words to evade filters", "phishing_link": "links lead to a different address than shown",
}

// checkNames are the methods that authenticate a sender, in the order of a page.
var checkNames = []struct{ Key, Name string }{{"dmarc", "DMARC"}, {"dkim", "DKIM"}, {"spf", "SPF"}, {"arc", "ARC"}}

// A check is the result of one such method, with an explanation of the method.
type check struct{ Name, Result, Means string }

// Proofs returns the results of the methods that authenticate the sender.
func (h heldMessage) Proofs() (out []check) {
	for _, c := range checkNames {
		if r := h.Checks[c.Key]; r != "" {
			out = append(out, check{c.Name, r, mailbox.CheckMeans(c.Key)})
		}
	}
	return out
}

// A quarantinePage lists the held messages, newest first.
type quarantinePage struct {
	Held   []heldMessage
	Chosen *heldMessage // the message that is shown in detail; nil if nothing is held
	Place  int          // of Chosen among Held, from 1
	Prev   string       // address of the message before it; empty if there is none
	Next   string
	Closed bool // at least one message is of an inbox that the viewer may not see
	More   bool
	Notice string
}

// choose chooses the message to show in detail: the one with this ID, else the first.
func (p *quarantinePage) choose(id string) {
	if len(p.Held) == 0 {
		return
	}
	i := max(0, slices.IndexFunc(p.Held, func(h heldMessage) bool { return h.ID == id }))
	p.Chosen, p.Place = &p.Held[i], i+1
	if i > 0 {
		p.Prev = p.Held[i-1].Link()
	}
	if i+1 < len(p.Held) {
		p.Next = p.Held[i+1].Link()
	}
}

// Link returns the address of the page that shows the message.
func (h heldMessage) Link() string { return "/console/quarantine?message=" + url.QueryEscape(h.ID) }

// quarantineHandlers releases or drops mail held in quarantine.
type quarantineHandlers struct{ reviews }

func (s quarantineHandlers) routes() []route {
	return []route{
		{"GET", "/console/quarantine", views, s.quarantine},
		{"POST", "/console/quarantine/{id}/release", decides, s.releaseMessage},
		{"POST", "/console/quarantine/{id}/drop", decides, s.dropMessage},
	}
}

func (s quarantineHandlers) quarantine(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showQuarantine(w, r, who, http.StatusOK, "")
}

func (s quarantineHandlers) showQuarantine(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	held, next, err := s.post.Quarantine(r.Context(), who, "", "", 100)
	if err != nil {
		return err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return err
	}
	senders, open, err := s.senders(r, who)
	if err != nil {
		return err
	}
	v := quarantinePage{More: next != "", Notice: notice}
	for _, h := range held {
		one := heldMessage{Held: h, Address: or(names[h.Inbox], h.Inbox)}
		one.Sender, one.Seen = senders[h.ID]
		v.Held, v.Closed = append(v.Held, one), v.Closed || !open[h.Inbox]
	}
	shape := "review"
	if r.URL.Query().Has("message") {
		shape = "review chosen" // on a narrow screen the message stands alone
	}
	v.choose(r.URL.Query().Get("message"))
	return s.render(r.Context(), w, status, page{Name: "quarantine", Title: "Quarantine", Who: who, Here: "inboxes", Body: v, shape: shape})
}

var messageID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^msg_[A-Z2-7]{26}$`) })

func (s quarantineHandlers) releaseMessage(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.judge(w, r, who, s.post.Release)
}

func (s quarantineHandlers) dropMessage(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.judge(w, r, who, s.post.Drop)
}

// judge settles one held message.
func (s quarantineHandlers) judge(w http.ResponseWriter, r *http.Request, who auth.Principal, settle settler) error {
	id := r.PathValue("id")
	if !messageID().MatchString(id) {
		return fmt.Errorf("message %q: %w", id, store.ErrNotFound)
	}
	err := settle(r.Context(), who, id)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return s.showQuarantine(w, r, who, http.StatusConflict, "Your click changed nothing: the message is not in quarantine.")
	case errors.Is(err, mailbox.ErrFull), errors.Is(err, directory.ErrNoInbox):
		return s.showQuarantine(w, r, who, http.StatusConflict, "Your click changed nothing: "+err.Error()+".")
	case err != nil:
		return err
	}
	http.Redirect(w, r, "/console/quarantine", http.StatusSeeOther)
	return nil
}

// arrived adds the sender and the subject of held mail to its page, for a viewer who has a
// context grant.
func (s actionHandlers) arrived(r *http.Request, who auth.Principal, v *actionPage) error {
	if v.Kind != policy.KindReceive || v.State != oversight.Pending || v.Unshown != "" || v.Changed {
		return nil
	}
	senders, _, err := s.senders(r, who)
	if m, seen := senders[mailbox.ArrivedMessage(&v.Action)]; err == nil && seen {
		v.View.Panels = slices.Insert(v.View.Panels, 0, oversight.Panel{Name: "Sender and subject, by your grant", Form: oversight.FormFacts, Rows: []oversight.PanelRow{
			{Name: "From", Value: m.From, Field: "-"}, {Name: "Subject", Value: or(m.Subject, "(no subject)"), Field: "-"},
		}})
	}
	return err
}
