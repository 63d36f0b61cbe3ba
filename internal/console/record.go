package console

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// perAuditPage is how many entries of the record a page shows.
const perAuditPage = 50

// An auditPage is a part of the record, newest first.
type auditPage struct {
	Entries      []audit.Entry
	Verb, Object string
	Older        string // address of the next page, or empty
	Paged        bool   // this is not the newest part
}

func (s *Server) audit(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx, query := r.Context(), r.URL.Query()
	v := auditPage{Verb: strings.TrimSpace(query.Get("verb")), Object: strings.TrimSpace(query.Get("object"))}
	for name, f := range map[string]string{"verb": v.Verb, "object": v.Object} {
		if len(f) > 300 || !utf8.ValidString(f) || strings.Contains(f, "\x00") {
			return fmt.Errorf("%w: %s must be text of at most 300 bytes", errForm, name)
		}
	}
	q := audit.Query{Project: who.Project, Verb: v.Verb, Object: v.Object, Limit: perAuditPage + 1}
	if before := query.Get("before"); before != "" {
		n, err := strconv.ParseInt(before, 10, 64)
		if err != nil || n < 1 {
			return fmt.Errorf("%w: before must be the number of an entry", errForm)
		}
		q.Before, v.Paged = n, true
	}
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		v.Entries, err = audit.List(ctx, tx, q)
		return err
	})
	if err != nil {
		return err
	}
	if len(v.Entries) > perAuditPage {
		v.Entries = v.Entries[:perAuditPage]
		next := url.Values{"before": {strconv.FormatInt(v.Entries[perAuditPage-1].Seq, 10)}}
		if v.Verb != "" {
			next.Set("verb", v.Verb)
		}
		if v.Object != "" {
			next.Set("object", v.Object)
		}
		v.Older = "/console/audit?" + next.Encode()
	}
	return s.render(w, http.StatusOK, page{Name: "audit", Title: "Record", Who: who, Here: "audit", Body: v})
}

// A verification is what reading the whole record brought.
type verification struct {
	Head   string
	Count  int    // entries that hold
	Known  string // the head that it had to contain, or empty
	Broken string // what does not hold; empty if all does
	At     time.Time
}

// verify reads the whole record. It is a POST although it changes nothing: it
// is much work, which no link and no prefetch should start.
func (s *Server) verify(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	v := verification{Known: strings.TrimSpace(r.PostForm.Get("known")), At: time.Now()}
	var known audit.Head
	if v.Known != "" {
		var err error
		if known, err = audit.ParseHead(v.Known); err != nil {
			return fmt.Errorf("%w: the noted head must look like 123:0a1b…, as a former verification showed it", errForm)
		}
	}
	select {
	case s.verifying <- struct{}{}:
		defer func() { <-s.verifying }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var head audit.Head
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		head, err = audit.Verify(ctx, tx, known)
		return err
	})
	if broken, ok := errors.AsType[*audit.BrokenError](err); ok {
		v.Broken = broken.Error()
	} else if err != nil {
		return err
	}
	v.Head, v.Count = head.String(), int(head.Seq)
	return s.render(w, http.StatusOK, page{Name: "verify", Title: "Record verified", Who: who, Here: "audit", Body: v})
}
