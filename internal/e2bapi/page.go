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

// A page is the part of a list that the caller asks for, in E2B's way: so many,
// and those that come after the place that the page before it ended at.
type page struct {
	limit int
	after string // a place, or empty for the first page
}

// place orders what a list shows: by time in microseconds, of fixed width, then by id.
func place(at time.Time, id string) string { return fmt.Sprintf("%020d.%s", at.UnixMicro(), id) }

// isPlace reports whether s may be what [place] returned.
func isPlace(s string) bool {
	at, id, _ := strings.Cut(s, ".")
	return len(at) == 20 && strings.Trim(at, "0123456789") == "" && id != ""
}

// pageOf returns the page that the query's limit and nextToken name.
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
	if err != nil || len(after) > 64 || len(after) > 0 && !isPlace(string(after)) {
		return page{}, fmt.Errorf("%w: nextToken: want one that an earlier page gave", errRequest)
	}
	p.after = string(after)
	return p, nil
}

// goesOn tells the caller that there is more than this page, which ends at last.
func goesOn(w http.ResponseWriter, last string) {
	w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(last)))
}

// each returns what f makes of each element of in. It is never nil: clients
// expect an empty list to be one.
func each[In, Out any](in []In, f func(In) Out) []Out {
	out := make([]Out, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}
