package e2bapi

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// A page is the part of a list that the query asks for, with E2B's pagination: a
// limit, and the position where the previous page ended.
type page struct {
	limit int
	after string // a cursor, or empty for the first page
}

// cursor returns the cursor of a list entry. Cursors sort by time in microseconds,
// of fixed width, and then by ID.
func cursor(at time.Time, id string) string { return fmt.Sprintf("%020d.%s", at.UnixMicro(), id) }

// isCursor reports whether s has the form of a cursor.
func isCursor(s string) bool {
	at, id, _ := strings.Cut(s, ".")
	return len(at) == 20 && strings.Trim(at, "0123456789") == "" && id != ""
}

// pageOf parses the query parameters limit and nextToken.
func pageOf(q url.Values) (page, error) {
	p := page{limit: 100}
	if l := q.Get("limit"); l != "" {
		n, err := strconv.Atoi(l)
		if err != nil || n < 1 || n > 100 {
			return page{}, fmt.Errorf("%w: limit: want 1 to 100", errRequest)
		}
		p.limit = n
	}
	after, err := base64.RawURLEncoding.DecodeString(q.Get("nextToken"))
	if err != nil || len(after) > 64 || len(after) > 0 && !isCursor(string(after)) {
		return page{}, fmt.Errorf("%w: nextToken: not a token of an earlier page", errRequest)
	}
	p.after = string(after)
	return p, nil
}

// setNextToken tells the caller that there are more entries after last.
func setNextToken(w http.ResponseWriter, last string) {
	w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(last)))
}

// each applies f to each element of in. Its result is never nil: clients expect []
// and not null.
func each[In, Out any](in []In, f func(In) Out) []Out {
	out := make([]Out, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}
