package mailapi

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// each applies f to each element of in. The result is never nil: in JSON an empty
// list must be [], not null.
func each[In, Out any](in []In, f func(In) Out) []Out {
	out := make([]Out, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}

// onlyParameters refuses unknown query parameters: a caller who filters by one
// would take the whole list for the filtered one.
func onlyParameters(q url.Values, names ...string) error {
	for _, name := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%w: query: unknown parameter %q, want some of %s", errRequest, name[:min(len(name), 60)], strings.Join(names, ", "))
		}
	}
	return nil
}

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
