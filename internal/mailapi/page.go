package mailapi

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/store"
)

// limit returns the query's limit.
func limit(q url.Values, unset, most int) (int, error) {
	if !q.Has("limit") {
		return unset, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("%w: limit: must be 1 to %d", errRequest, most)
	}
	return n, nil
}

// A position is where a page of a list ends: the time and the id of its last
// element, by which every list is ordered. The zero position is the beginning.
type position struct {
	At time.Time
	ID string
}

// String returns the position as the cursor that callers hand back. They must
// not read anything into it.
func (p position) String() string {
	if p.ID == "" {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(store.Time(p.At), 10) + " " + p.ID))
}

// page returns the query's limit, and the position that its cursor names. A
// list's answer has next_cursor, which is [position.String] of its last element
// if there are more and empty otherwise; to know whether there are, ask the
// database for one more than the limit and hand that to [cut].
func page(q url.Values, unset, most int) (n int, after position, err error) {
	if n, err = limit(q, unset, most); err != nil || !q.Has("cursor") {
		return n, after, err
	}
	b, err := base64.RawURLEncoding.DecodeString(q.Get("cursor"))
	at, id, ok := strings.Cut(string(b), " ")
	us, numErr := strconv.ParseInt(at, 10, 64)
	// The attack: a cursor that is made up to reach the database as something
	// that it does not take.
	if err != nil || !ok || numErr != nil || us < 0 || !idForm().MatchString(id) {
		return 0, position{}, fmt.Errorf("%w: cursor: must be the next_cursor of the page before", errRequest)
	}
	return n, position{store.FromTime(us), id}, nil
}

// cut returns the first n of list, and the cursor of the next page or nothing
// if this is the last. Where tells the position of an element.
func cut[T any](list []T, n int, where func(T) position) ([]T, string) {
	if len(list) <= n {
		return list, ""
	}
	return list[:n], where(list[n-1]).String()
}
