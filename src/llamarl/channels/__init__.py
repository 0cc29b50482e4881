"""Directed, named, bounded edges; the payload goes from source to sink directly."""
