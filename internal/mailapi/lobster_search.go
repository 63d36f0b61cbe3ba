package mailapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/message"
)

// maxSearchWait is how long a search of several inboxes goes on to index, all of them
// together; each has a second.
const maxSearchWait = 8 * time.Second

// lobsterSearch looks in one inbox, or in all that the token has a part in.
func (s lobsterServer) lobsterSearch(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.key == "" || c.Kind != auth.Agent && c.Kind != auth.Grant {
		return fmt.Errorf("a %s manages inboxes but cannot open them: %w", c.Kind, auth.ErrForbidden)
	}
	q := r.URL.Query()
	n, err := limit(q, 20, 50)
	if err != nil {
		return err
	}
	filters, err := lobsterFilters(q)
	if err != nil {
		return err
	}
	inboxes, err := s.lobsterScope(r, c, q.Get("inboxId"))
	if err != nil {
		return err
	}
	var found []message.Message
	complete, pending := true, 0
	until := time.Now().Add(maxSearchWait)
	for _, b := range inboxes {
		k, err := s.post.Keys.Open(r.Context(), c.Principal, c.key, b)
		if err != nil {
			return err
		}
		// One more than is wanted of each: then whether there are more is known.
		search := mailbox.Search{Query: lobsterQuery(q.Get("q"), filters), Limit: n + 1, Cursor: q.Get("cursor"), Wait: max(time.Until(until), time.Second)}
		got, err := s.post.Index.Search(r.Context(), c.Principal, k, search)
		if errors.Is(err, directory.ErrInvalid) && strings.TrimSpace(q.Get("q")) != "" {
			// LobsterMail has words and no language: "Re: 50%" is a text to look for.
			search.Query = lobsterQuery(quoted(q.Get("q")), filters)
			got, err = s.post.Index.Search(r.Context(), c.Principal, k, search)
		}
		if err != nil {
			return err
		}
		found = append(found, got.Messages...)
		complete, pending = complete && got.Complete, pending+got.Pending
	}
	slices.SortFunc(found, func(a, b message.Message) int {
		if c := b.At.Compare(a.At); c != 0 {
			return c
		}
		return strings.Compare(b.ID, a.ID)
	})
	page := map[string]any{"hasMore": len(found) > n, "cursor": nil, "complete": complete, "pending": pending}
	if len(found) > n {
		found = found[:n]
		page["cursor"] = found[n-1].Cursor()
	}
	answer(w, http.StatusOK, map[string]any{"data": lobstersOf(found), "pagination": page})
	return nil
}

// lobsterScope returns the inboxes that a search is about.
func (s lobsterServer) lobsterScope(r *http.Request, c caller, inbox string) ([]string, error) {
	if inbox != "" {
		b, _, err := s.post.Keys.Reach(r.Context(), c.Principal, inbox)
		return []string{b.ID}, err
	}
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	var out []string
	for _, b := range list {
		out = append(out, b.ID)
	}
	return out, err
}

// lobsterFilters returns LobsterMail's filters as terms of our own language.
func lobsterFilters(q url.Values) (terms []string, err error) {
	d, err := direction(q)
	if err != nil {
		return nil, err
	}
	switch d {
	case message.In:
		terms = append(terms, "-in:sent")
	case message.Out:
		terms = append(terms, "in:sent")
	}
	if from := q.Get("from"); from != "" {
		terms = append(terms, "from:"+quoted(from))
	}
	for name, term := range map[string]string{"since": "after:", "until": "before:"} {
		t, err := instant(q, name)
		if err != nil {
			return nil, err
		}
		if !t.IsZero() {
			terms = append(terms, term+strconv.FormatInt(max(t.Unix(), 1e8), 10))
		}
	}
	switch q.Get("hasAttachments") {
	case "":
	case "true":
		terms = append(terms, "has:attachment")
	case "false":
		terms = append(terms, "-has:attachment")
	default:
		return nil, fmt.Errorf("%w: hasAttachments: must be true or false", errRequest)
	}
	return terms, nil
}

func lobsterQuery(text string, filters []string) string {
	if text = strings.TrimSpace(text); text != "" {
		filters = append([]string{"(" + text + ")"}, filters...)
	}
	if len(filters) == 0 {
		return "after:100000000" // all: there was no mail of ours before
	}
	return strings.Join(filters, " ")
}

// quoted returns text as one that is looked for as it is.
func quoted(text string) string { return `"` + strings.ReplaceAll(text, `"`, " ") + `"` }
