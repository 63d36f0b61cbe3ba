package console

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"

	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

// A settler ends the quarantine of a message.
type settler func(ctx context.Context, who auth.Principal, id string) error

// A suspended is an inbox or a domain that sends nothing, as a page names it.
type suspended struct {
	delivery.Suspension
	Name string // an address or a domain
}

// A departure is an approved email that is not settled yet.
type departure struct {
	listed
	Deliveries []delivery.Delivery
}

// A lookup is the result of looking up an address in the suppression list.
type lookup struct {
	Address string
	Found   bool
	Reason  string // in words
	delivery.Suppression
	Inbox string // the address
}

// A sendingPage shows how mail leaves: emails on their way, counts of suppressed addresses,
// and inboxes and domains that are suspended.
type sendingPage struct {
	Leaving   []departure
	Counts    []suppressionCount
	Total     int
	Suspended []suspended
	Lookup    *lookup
	Notice    string
}

type suppressionCount struct {
	Reason string
	N      int
}

// suppressionNames say why nothing is sent to an address.
var suppressionNames = map[delivery.SuppressionReason]string{
	delivery.SuppressedBounce: "the address does not exist, according to its server", delivery.SuppressedComplaint: "the recipient reported mail as spam",
	delivery.SuppressedUnsubscribe: "the recipient unsubscribed", delivery.SuppressedAdded: "added by a person or a project key",
}

// maxLeaving bounds the emails on their way that a page shows.
const maxLeaving = 25

// sendingHandlers shows deliveries, suspensions and the suppression list.
type sendingHandlers struct{ reviews }

func (s sendingHandlers) routes() []route {
	return []route{
		{"GET", "/console/sending", views, s.sending},
		{"POST", "/console/sending/lookup", decides, s.lookUp},
		{"POST", "/console/sending/suppression", decides, s.suppress},
		{"POST", "/console/sending/lift", manages, s.lift},
	}
}

func (s sendingHandlers) sending(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showSending(w, r, who, http.StatusOK, sendingPage{})
}

func (s sendingHandlers) showSending(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, v sendingPage) error {
	ctx := r.Context()
	counts, err := s.post.Suppression.Count(ctx, who)
	if err != nil {
		return err
	}
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		v.Counts = append(v.Counts, suppressionCount{or(suppressionNames[reason], string(reason)), counts[reason]})
		v.Total += counts[reason]
	}
	names, err := s.addresses(ctx, who)
	if err != nil {
		return err
	}
	ss, err := s.post.Delivery.Suspensions(ctx, who)
	if err != nil {
		return err
	}
	for _, x := range ss {
		v.Suspended = append(v.Suspended, suspended{x, or(names[x.Scope], x.Scope)})
	}
	l, err := s.list(r, who, 1, oversight.Approved, oversight.Executing)
	if err != nil {
		return err
	}
	for _, a := range l.Actions[:min(len(l.Actions), maxLeaving)] {
		if a.Kind != mailbox.SendKind {
			continue
		}
		ds, err := s.post.Deliveries(ctx, who, a.ID)
		if err != nil {
			return err
		}
		v.Leaving = append(v.Leaving, departure{a, ds})
	}
	if v.Lookup != nil && v.Lookup.Suppression.Inbox != "" {
		v.Lookup.Inbox = or(names[v.Lookup.Suppression.Inbox], v.Lookup.Suppression.Inbox)
	}
	return s.render(r.Context(), w, status, page{Name: "sending", Title: "Sending", Who: who, Here: "inboxes", Body: v})
}

// lookUp reports whether an address is on the suppression list. It is a POST
// although it changes nothing: browsers and proxies keep the addresses of links.
func (s sendingHandlers) lookUp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	address := strings.TrimSpace(r.PostForm.Get("address"))
	found, err := s.post.Suppression.Find(r.Context(), who, address)
	if why := addressRefused(err); why != "" {
		return s.showSending(w, r, who, http.StatusBadRequest, sendingPage{Notice: why, Lookup: &lookup{Address: address}})
	}
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	return s.showSending(w, r, who, http.StatusOK, sendingPage{Lookup: &lookup{Address: address, Found: err == nil, Reason: or(suppressionNames[found.Reason], string(found.Reason)), Suppression: found}})
}

// addressRefused tells a person why an address is not valid. It is empty for other errors.
func addressRefused(err error) string {
	if field, ok := errors.AsType[*mail.FieldError](err); ok {
		return "Invalid address: " + field.Reason + "."
	}
	if errors.Is(err, directory.ErrInvalid) {
		return sentence(strings.TrimPrefix(err.Error(), directory.ErrInvalid.Error()+": "))
	}
	return ""
}

func (s sendingHandlers) suppress(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	address := strings.TrimSpace(r.PostForm.Get("address"))
	var err error
	switch r.PostForm.Get("do") {
	case "add":
		err = s.post.Suppression.Add(r.Context(), who, address)
	case "remove":
		err = s.post.Suppression.Remove(r.Context(), who, address)
	default:
		return formError(errors.New("do"))
	}
	if why := addressRefused(err); why != "" {
		return s.showSending(w, r, who, http.StatusBadRequest, sendingPage{Notice: why})
	}
	if errors.Is(err, store.ErrNotFound) {
		return s.showSending(w, r, who, http.StatusConflict, sendingPage{Notice: "Your click changed nothing: the address is not on the list."})
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/sending", http.StatusSeeOther)
	return nil
}

func (s sendingHandlers) lift(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	reason := typed(r, "reason")
	if strings.TrimSpace(reason) == "" || len(reason) > 1000 {
		return s.showSending(w, r, who, http.StatusBadRequest, sendingPage{Notice: "Describe in at most 1000 bytes what was done to fix it. Nothing was changed."})
	}
	err := s.post.Delivery.Lift(r.Context(), who, r.PostForm.Get("scope"), reason)
	if errors.Is(err, store.ErrNotFound) {
		return s.showSending(w, r, who, http.StatusConflict, sendingPage{Notice: "Your click changed nothing: it is no longer suspended."})
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/sending", http.StatusSeeOther)
	return nil
}

// deliveryNames names the states of a delivery.
var deliveryNames = map[delivery.State]string{
	delivery.Queued: "queued", delivery.Sending: "sending", delivery.Delivered: "delivered",
	delivery.Deferred: "retrying", delivery.Bounced: "not delivered", delivery.Suppressed: "not sent",
	delivery.Uncertain: "outcome unknown", delivery.Cancelled: "cancelled",
}
