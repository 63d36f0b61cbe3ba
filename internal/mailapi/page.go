package mailapi

import (
	"fmt"
	"net/url"
	"strconv"
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
