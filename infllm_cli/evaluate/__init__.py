"""Measuring answers: questions with known answers, asked in several ways."""
