package client

import (
	"context"
	"iter"
	"net/url"
	"strconv"
)

// all returns the elements of all pages. It fetches a page when the loop needs
// it; an error ends the loop.
func all[T any](ctx context.Context, fetch func(ctx context.Context, cursor string) (page []T, next string, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for cursor := ""; ; {
			page, next, err := fetch(ctx, cursor)
			if err != nil {
				var zero T
				yield(zero, err)
				return
			}
			for _, v := range page {
				if !yield(v, nil) {
					return
				}
			}
			if next == "" || next == cursor {
				return
			}
			cursor = next
		}
	}
}

// A PageQuery asks for a part of a list.
type PageQuery struct {
	Cursor string // the NextCursor of the page before; empty: the first page
	Limit  int    // elements of a page; 0: the server's default
}

func (q PageQuery) values() url.Values {
	v := url.Values{}
	if q.Cursor != "" {
		v.Set("cursor", q.Cursor)
	}
	if q.Limit != 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	return v
}
