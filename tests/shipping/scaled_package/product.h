#pragma once
template <class T> T product(T a, T b) { return a * b; }
